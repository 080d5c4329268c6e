"""Ranks as tasks of a Spark job: replacements for ``horovod.spark.run`` and Databricks' ``HorovodRunner``."""

try:
    from dualtrain.spark.barrier import run
    from dualtrain.spark.runner import HorovodRunner
except ModuleNotFoundError as error:
    if error.name != "pyspark":
        raise
    message = "dualtrain.spark needs pyspark, which is not installed: pip install 'dualtrain[spark]'"
    raise ModuleNotFoundError(message, name="pyspark") from None

__all__ = ["HorovodRunner", "run"]
