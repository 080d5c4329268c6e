"""``python -m dualtrain.predict RUN IMAGE [IMAGE …]``: print the likeliest classes of images, according to a trained model.

An image is converted to the channels of the dataset's images and, unless the dataset is imagefolder, to their size. Then it
is transformed as in evaluation. Colours are not inverted: a model of digits or mnist needs light strokes on a dark
background. If IMAGE is a folder, all images below it are classified. All images are read before the first line is printed.
The model computes in float32, also after training with --amp.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtrain.console import given_path, parser_of, print_error, refuse_removed_folder, show
from dualtrain.errors import UserError
from dualtrain.files import read_json

if TYPE_CHECKING:
    import torch
    from torch import nn

SHOWN = 5  # printed classes per image
BATCH = 64  # images per forward pass
# For each dataset that is held in memory: the images' mode in PIL, and the length of their sides in pixels.
IMAGES = {"digits": ("L", 8), "mnist": ("L", 28), "fashion-mnist": ("L", 28), "cifar10": ("RGB", 32)}


def predict(run: str, files: Sequence[str], *, best: bool = False) -> list[list[tuple[str, float]]]:
    """Return, for each image file, at most five classes with their probabilities, the likeliest first.

    Args:
        run: the run's folder.
        files: images, in formats that ``data.decode`` supports.
        best: use the weights of the best evaluation instead of the last step.

    Raises:
        UserError: ``run`` is not a run's folder, has no weights or does not classify images; image files cannot be
            converted to the inputs of its dataset; its files do not fit together; or an image cannot be read.
    """
    folder = Path(run)
    config, task, weights = _describe(folder, best)
    import torch

    read = _reader(config)
    model = _load(weights, config, task)
    titles = task.get("class_names")
    names = dict(enumerate(titles if isinstance(titles, list) else ()))
    answers = []
    for start in range(0, len(files), BATCH):
        images = torch.cat([read(file) for file in files[start : start + BATCH]])
        if list(images.shape[1:]) != task["shape"]:
            made = f"its config.json makes images of shape {list(images.shape[1:])}, and its task.json has {task['shape']}"
            raise UserError(f"{run!r} contradicts itself ({made}): copy the run's folder again")
        with torch.inference_mode():
            logits = model(images)
        # Several probabilities can underflow to 0, so order the classes by their logits.
        numbers = logits.topk(min(SHOWN, logits.shape[1]), 1).indices
        values = logits.softmax(1).gather(1, numbers)
        for row in zip(numbers.tolist(), values.tolist(), strict=True):
            answers.append([(str(names.get(number, number)), value) for number, value in zip(*row, strict=True)])
    return answers


def _describe(folder: Path, best: bool) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Return the run's settings, its task, and the file of its weights."""
    config = _read_json(folder / "config.json", f"{str(folder)!r} is not the folder of a run", "name one")
    cure = "name a run that classifies images"
    task = _read_json(folder / "task.json", f"the run {str(folder)!r} does not describe its model's input", cure)
    if task.get("kind") != "classes" or not _is_shape(task.get("shape")) or not _is_size(task.get("classes")):
        raise UserError(f"{str(folder)!r} is not a run that classifies images: name a run that does")
    weights, other = folder / "model.safetensors", folder / "model-best.safetensors"
    if best:
        weights, other = other, weights
    if not weights.exists():
        cure = f"{'leave out' if best else 'give'} --best to use {other.name}" if other.exists() else "train it to its end"
        raise UserError(f"{str(folder)!r} has no {weights.name}: {cure}")
    return config, task, weights


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_size, value))


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _read_json(path: Path, fact: str, cure: str) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{fact} (no readable {path.name}): {cure}") from error
    if not isinstance(value, dict):
        raise UserError(f"{fact} ({path.name} is not a JSON object): {cure}")
    return value


def _load(weights: Path, config: dict[str, Any], task: dict[str, Any]) -> nn.Module:
    """Build the run's model in evaluation mode, with the weights of a file."""
    from dualtrain.models import build
    from dualtrain.models.weights import differences, read_safetensors

    try:
        state = read_safetensors(weights)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{str(weights)!r} cannot be read ({reason}): copy it again") from error
    name, pretrained = str(config.get("model")), config.get("pretrained") is True
    model = build(name, tuple(task["shape"]), task["classes"], pretrained=pretrained, load_published=False)
    wrong = differences(model.state_dict(), state)
    if wrong:
        raise UserError(
            f"{str(weights)!r} does not fit the model {name} ({'; '.join(wrong)}): use the code that trained the run"
        )
    model.load_state_dict(state, strict=False)
    return model.eval()


def _reader(config: dict[str, Any]) -> Callable[[str], torch.Tensor]:
    """Return a function that reads an image file, and transforms it as the run's evaluation does: float32 (1, c, h, w)."""
    import torch

    from dualtrain.config import SETTINGS
    from dualtrain.data.catalog import transforms_of
    from dualtrain.data.image_folder import geometries
    from dualtrain.data.images import ImageFiles
    from dualtrain.data.options import NAMES, Options

    settings = {name: config[name] for name in NAMES if config.get(name) is not None}
    wrong = [name for name, value in settings.items() if not SETTINGS[name].accepts(value)]
    if wrong:
        raise UserError(
            f"the run's config.json has an invalid value: {wrong[0]} is {settings[wrong[0]]!r}; copy the run's folder again"
        )
    options = Options(**settings)
    dataset, sample_indices = str(config.get("dataset")), torch.zeros(1, dtype=torch.int64)
    if dataset == "imagefolder":
        _, geometry, normalized = geometries(options)

        def read_file(file: str) -> torch.Tensor:
            batch = ImageFiles([(file, 0)], geometry).__getitems__(([0], 0))
            if isinstance(batch, UserError):
                raise batch
            return normalized(batch[0], sample_indices, 0)

        return read_file
    if dataset not in IMAGES:
        raise UserError(
            f"image files cannot be converted to the inputs of the run's --dataset {dataset}: name a run with one of "
            f"imagefolder, {', '.join(IMAGES)}"
        )
    mode, side = IMAGES[dataset]
    _, evaluation, _ = transforms_of(dataset, len(mode), side, options)
    return lambda file: evaluation(_pixels(file, mode, side, dataset), sample_indices, 0)


def _pixels(file: str, mode: str, side: int, dataset: str) -> torch.Tensor:
    """Read an image, and convert it to the dataset's form, (1, c, side, side): uint8, or for digits float32 from 0 to 1."""
    import numpy
    import torch
    from PIL import Image

    from dualtrain.data.decode import read_image
    from dualtrain.data.digits import LARGEST_PIXEL

    image = read_image(file)
    small = image.convert(mode)
    small = small if small.size == (side, side) else small.resize((side, side), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(numpy.array(small)).reshape(side, side, len(mode)).permute(2, 0, 1)[None]
    if dataset != "digits":
        return pixels
    return (pixels.float() * (LARGEST_PIXEL / 255)).round() / LARGEST_PIXEL


def _expanded(paths: Sequence[str]) -> list[str]:
    """Return the files among ``paths``, and the images below folders.

    Raises UserError for a folder that cannot be read, or has no images.
    """
    files: list[str] = []
    for name in paths:
        if not os.path.isdir(name):
            files.append(name)
            continue
        from dualtrain.data.tree import EXTENSIONS, images_below

        try:
            found = images_below(name)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"the folder {name!r} cannot be read ({reason}): give a folder that you may read") from error
        if not found:
            raise UserError(f"the folder {name!r} holds no image files ({', '.join(EXTENSIONS)}): name another folder")
        files += found
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each image; return the exit status: 0, or 2 for an error that the user can fix."""
    parser = parser_of("dualtrain.predict", str(__doc__))
    parser.add_argument("run", type=given_path, metavar="RUN", help="a run's folder")
    parser.add_argument("images", nargs="+", type=given_path, metavar="IMAGE", help="an image file, or a folder of them")
    parser.add_argument("--best", action="store_true", help="use model-best.safetensors, from the best evaluation")
    parser.add_argument("--json", action="store_true", help="print each image's answer as a line of JSON")
    try:
        parsed = parser.parse_args(arguments)
        refuse_removed_folder()
        from dualtrain.user_code import enough_memory  # imports torch

        with enough_memory("check the run's task.json and config.json"):
            files = _expanded(parsed.images)
            answers = predict(parsed.run, files, best=parsed.best)
        for file, classes in zip(files, answers, strict=True):
            show(_line(file, classes, as_json=parsed.json))
    except UserError as error:
        print_error(error)
        return 2
    return 0


def _line(file: str, classes: Sequence[tuple[str, float]], *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"image": file, "classes": [{"class": name, "probability": value} for name, value in classes]})
    line = f"{file}: {', '.join(f'{name} {value:.1%}' for name, value in classes)}"
    return line.replace("\n", "\\n")  # one line for each image, even if its name contains a line end


if __name__ == "__main__":
    sys.exit(main())
