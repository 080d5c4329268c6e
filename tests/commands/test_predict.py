"""Prediction from image files: images are transformed as in evaluation, and wrong input is refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image

import dualtrain.training.loop as loop
from dualtrain import predict as module
from dualtrain.backends import connect
from dualtrain.config import parse
from dualtrain.data import Batch, load_data
from dualtrain.data.digits import read_digits
from dualtrain.errors import UserError
from dualtrain.models import build
from dualtrain.predict import main, predict

COUNT = 100


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on the digits, with normalization, for four epochs; return the run's folder. Its task.json names no classes."""
    folder = tmp_path_factory.mktemp("predict") / "run"
    with connect("local") as backend, pytest.MonkeyPatch.context() as patch:
        # Use one thread: on a busy machine, two threads that share a tiny batch mostly wait for each other.
        patch.setattr(loop, "threads", lambda backend: 1)
        loop.train(parse(["--epochs", "4", "--normalize", "dataset", "--run-dir", str(folder)]), backend)
    task = {"shape": [1, 8, 8], "classes": 10, "kind": "classes", "class_names": None}
    (folder / "task.json").write_text(json.dumps(task))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Copy the trained run, and return the copy's folder. A test may change the copy."""
    return shutil.copytree(trained, tmp_path / "run")


def save(pixels: torch.Tensor, path: Path) -> str:
    """Save a digit of shape (1, 8, 8), with values from 0 to 1, as a PNG file; return its path as text."""
    Image.fromarray(pixels[0].mul(255).round().byte().numpy()).save(path)
    return str(path)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("digits")
    _, (images, _) = read_digits()
    return [save(image, folder / f"{number}.png") for number, image in enumerate(images[:COUNT])]


def test_predictions_from_files_equal_the_models_outputs_for_the_evaluation_tensors(trained, digits):
    answers = predict(str(trained), digits)
    source = load_data("digits", normalize="dataset").val
    inputs, targets = next(source.stream([Batch(torch.arange(COUNT))], torch.device("cpu")))
    model = build("convnet", (1, 8, 8), 10).eval()
    model.load_state_dict(safetensors.torch.load_file(trained / "model.safetensors"))
    with torch.inference_mode():
        probabilities = torch.cat([model(part).softmax(1) for part in inputs.split(module.BATCH)])
    values, numbers = probabilities.max(1)
    likeliest = [(str(number), value) for number, value in zip(numbers.tolist(), values.tolist(), strict=True)]
    assert [answer[0] for answer in answers] == likeliest
    right = sum(answer[0][0] == str(target) for answer, target in zip(answers, targets.tolist(), strict=True))
    expected = json.loads((trained / "summary.json").read_text())["val_accuracy"]
    assert expected > 0.8
    assert right / COUNT == pytest.approx(expected, abs=0.06)


def test_the_likeliest_classes_come_first_with_their_names(run, digits, capsys):
    task = json.loads((run / "task.json").read_text())
    (run / "task.json").write_text(json.dumps({**task, "class_names": [f"digit-{n}" for n in range(10)]}))
    assert main([str(run), *digits[:2]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": digit-")[0] for line in lines] == digits[:2]
    assert main([str(run), digits[0], "--json"]) == 0
    classes = json.loads(capsys.readouterr().out)["classes"]
    probabilities = [each["probability"] for each in classes]
    assert len(probabilities) == module.SHOWN
    assert probabilities == sorted(probabilities, reverse=True)


class Steep(torch.nn.Module):
    """A model whose logits are so far apart that most float32 probabilities are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([-900.0, -800.0, -950.0, -300.0, -150.0, 0.0, -200.0, -850.0]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits.repeat(len(images), 1)


def steep() -> torch.nn.Module:
    return Steep()


def test_classes_whose_probabilities_are_0_are_in_the_order_of_their_logits(run, digits):
    change(run / "config.json", model="tests.commands.test_predict:steep")
    safetensors.torch.save_file(steep().state_dict(), run / "model.safetensors")
    for answer in predict(str(run), digits[:2]):
        assert answer == [("5", 1.0), ("4", 0.0), ("6", 0.0), ("3", 0.0), ("1", 0.0)]


def test_a_colour_image_of_another_size_is_converted_to_the_format_of_digits(trained, digits, tmp_path):
    large = tmp_path / "large.jpg"
    Image.open(digits[0]).resize((160, 160), Image.Resampling.NEAREST).convert("RGB").save(large, quality=100)
    assert predict(str(trained), [str(large)])[0][0][0] == predict(str(trained), digits[:1])[0][0][0]


def test_files_of_an_image_folder_are_transformed_as_in_evaluation(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            pixels = torch.randint(256, (40, 50, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "data" / part / name / "0.png")
    options = {"image_size": 8, "resize": 12, "workers": 0}
    val = load_data("imagefolder", str(tmp_path / "data"), **options).val
    wanted = torch.cat([inputs for inputs, _ in val.stream([Batch(torch.arange(2))], torch.device("cpu"))])
    read = module._reader({"dataset": "imagefolder", **options})
    files = [str(tmp_path / "data" / "val" / name / "0.png") for name in ("cat", "dog")]
    assert torch.equal(torch.cat([read(file) for file in files]), wanted)


def test_the_best_weights_are_used_on_request(run, digits, capsys):
    assert main([str(run), digits[0]]) == 0
    with_final_weights = capsys.readouterr().out
    torch.manual_seed(7)
    best = build("convnet", (1, 8, 8), 10)
    safetensors.torch.save_file(best.state_dict(), run / "model-best.safetensors")
    assert main([str(run), digits[0], "--best"]) == 0
    assert capsys.readouterr().out != with_final_weights
    (run / "model.safetensors").unlink()
    assert main([str(run), digits[0]]) == 2
    assert "give --best to use model-best.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "flags"), [("model", []), ("model-best", ["--best"])])
def test_weights_with_a_changed_bit_are_refused(run, digits, capsys, name, flags):
    file = run / f"{name}.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main([str(run), digits[0], *flags]) == 2
    reason = "(its content does not match its hash): copy"
    assert capsys.readouterr().err.startswith(f"dualtrain: error: {str(file)!r} cannot be read {reason} it again")
    with pytest.raises(UserError, match=re.escape(f"--weights {str(file)!r} is damaged {reason} the file again")):
        build("convnet", (1, 8, 8), 10, weights=str(file))


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_users_own_model_is_built_and_must_fit_the_weights(run, digits, capsys):
    change(run / "config.json", model="tests.commands.test_predict:model_with_3_classes")
    assert main([str(run), digits[0]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dualtrain: error: ")
    assert "does not fit the model tests.commands.test_predict:model_with_3_classes" in error
    safetensors.torch.save_file(model_with_3_classes().state_dict(), run / "model.safetensors")
    assert main([str(run), digits[0]]) == 0


def model_with_3_classes() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))


def test_a_pretrained_model_converts_its_inputs_as_in_training_and_downloads_nothing(tmp_path, monkeypatch):
    """With ``--pretrained``, GoogLeNet converts images from ImageNet's normalization to that of its weights."""
    monkeypatch.setattr(torch.hub, "download_url_to_file", None)
    task = {"shape": [3, 32, 32], "classes": 2}
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(build("googlenet", (3, 32, 32), 2).state_dict(), file)
    for pretrained in (True, False):
        loaded = module._load(file, {"model": "googlenet", "pretrained": pretrained}, task)
        assert loaded.transform_input is pretrained


def test_the_predict_command_expands_a_folder_to_the_images_below_it(trained, digits, tmp_path, capsys):
    (tmp_path / "more").mkdir()
    for number, name in enumerate(("b.png", "more/c.PNG", "a.png")):
        shutil.copy(digits[number], tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    assert main([str(trained), digits[3], str(tmp_path), "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["image"] for line in shown] == [
        digits[3],
        *(str(tmp_path / name) for name in ("a.png", "b.png", "more/c.PNG")),
    ]
    for line, number in zip(shown, (3, 2, 0, 1), strict=True):
        ((best, *_),) = predict(str(trained), [digits[number]])
        assert line["classes"][0]["class"] == best[0]
    (tmp_path / "empty").mkdir()
    assert main([str(trained), str(tmp_path / "empty")]) == 2
    assert "holds no image files (.jpg" in capsys.readouterr().err


def test_one_unreadable_image_is_named_before_any_answer(run, digits, tmp_path, capsys):
    (tmp_path / "text.png").write_text("no image")
    Image.new("I;16", (8, 8)).save(tmp_path / "deep.png")
    for bad, reason in (("text.png", "none of JPEG"), ("deep.png", "8 bits"), ("gone.png", "No such file")):
        assert main([str(run), digits[0], str(tmp_path / bad)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert bad in printed.err
        assert reason in printed.err
        assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("task.json", {"kind": "tokens"}, "not a run that classifies images"),
        ("config.json", {"dataset": "synthetic"}, "cannot be converted to the inputs of the run's --dataset synthetic"),
        ("config.json", {"model": "nonesuch"}, "is not known"),
        ("config.json", {"normalize": "x"}, "--normalize must be"),
        ("config.json", {"image_size": -1}, "has an invalid value: image_size is -1; copy the run's folder again"),
        (
            "task.json",
            {"shape": [1, 9, 9]},
            "its config.json makes images of shape [1, 8, 8], and its task.json has [1, 9, 9]",
        ),
    ],
)
def test_runs_whose_models_cannot_classify_image_files_are_refused(run, digits, capsys, file, values, words):
    change(run / file, **values)
    assert main([str(run), digits[0]]) == 2
    assert words in capsys.readouterr().err


def test_folders_without_a_model_and_bad_command_lines_are_refused(run, digits, tmp_path, capsys):
    (run / "model.safetensors").write_bytes(b"damaged")
    cases = [
        ([str(run), digits[0]], "cannot be read"),
        ([str(tmp_path), digits[0]], "is not the folder of a run (no readable config.json): name one"),
        ([str(tmp_path / "undescribed"), digits[0]], "input (no readable task.json): name a run that classifies images"),
        ([], "RUN"),
    ]
    (tmp_path / "undescribed").mkdir()
    (tmp_path / "undescribed" / "config.json").write_text("{}")
    cases += [([str(run), digits[0], "--best"], "no model-best.safetensors"), ([str(run)], "IMAGE")]
    (run / "model-best.safetensors").unlink(missing_ok=True)
    for arguments, words in cases:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    (run / "model.safetensors").unlink()
    assert main([str(run), digits[0]]) == 2
    assert "train it to its end" in capsys.readouterr().err
