"""``RayExecutor``, which runs ranks as Ray actors and replaces ``horovod.ray.RayExecutor``."""

try:
    from dualtrain.ray.executor import RayExecutor
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    message = "dualtrain.ray needs ray, which is not installed: pip install 'dualtrain[ray]'"
    raise ModuleNotFoundError(message, name="ray") from None

__all__ = ["RayExecutor"]
