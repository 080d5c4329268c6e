"""The report's page in a real browser: axes, values under the pointer, arrow keys, the legend. Needs Chromium."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dualtrain.report.report_page import page
from dualtrain.report.runs import read_runs
from tests.commands.test_report import make

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: bash tests/extras.sh browser")

#: Script that runs after the page's own script, and writes its observations into an element of the page.
VISIT = """
const seen = {};
const figure = document.querySelector("figure.chart");
const svg = figure.querySelector(":scope > svg");
const tip = figure.querySelector(".tip");
const texts = (query) => [...figure.querySelectorAll(query)].map((one) => one.textContent);
const isDrawn = (path) => getComputedStyle(path).display !== "none";
const shown = () => [...figure.querySelectorAll(".plot path.line")].filter(isDrawn)
  .map((one) => one.parentNode.dataset.run + one.dataset.kind);
const button = (query) => document.querySelector(query);
const point = (share) => {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + share * box.width, clientY: box.top + 5 }));
  return [...tip.querySelectorAll("tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
};
seen.ticks = texts(".axes text");
seen.width = [document.documentElement.scrollWidth, innerWidth];
seen.heights = [...document.querySelectorAll(".plot")].map((plot) => plot.viewBox.baseVal.height);
seen.all = shown();
seen.hidden = tip.hidden;
seen.tip = point(1);
seen.fits = tip.getBoundingClientRect().right <= innerWidth && tip.getBoundingClientRect().left >= 0;
svg.dispatchEvent(new PointerEvent("pointerleave"));
seen.hiddenAgain = tip.hidden;
button('button[data-run="1"]').click();
seen.one = [shown(), button('button[data-run="1"]').getAttribute("aria-pressed"), texts(".axes text"), point(1)];
button('figure button[data-kind="step"]').click();
seen.kinds = shown();
button('figure button[data-kind="step"]').click();
button('button[data-run="1"]').click();
seen.again = [shown(), texts(".axes text")];
button('button[data-run="1"]').dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
seen.alone = shown();
button('button[data-run="1"]').dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
seen.whole = shown();
svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
seen.first = tip.querySelector("th").textContent;
svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
seen.second = tip.querySelector("th").textContent;
document.body.appendChild(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
"""


def visit(text: str, folder: Path, width: int) -> tuple[dict[str, Any], str]:
    """Open a page with ``VISIT`` in it; return its observations and the browser's console output."""
    # Remove the page's content security policy, which allows only the page's own script.
    path = folder / "visited.html"
    path.write_text(re.sub("<meta http-equiv[^>]*>", "", text).replace("</body>", f"<script>{VISIT}</script></body>"))
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(folder)})
    found = re.search('<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    assert found, console
    return json.loads(html.unescape(found[1])), console


def test_the_charts_respond_to_the_pointer_the_arrow_keys_and_the_legend(tmp_path):
    runs = [make(tmp_path / name) for name in ("run-a", "a-run-of-a-very-long-name-" * 4)]
    metrics = Path(runs[1]) / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "step", "step": 400, "loss": 70.0}\n')
    seen, console = visit(page(read_runs(runs)), tmp_path, 500)
    assert console == ""
    assert {"0", "20", "40", "60", "100", "400", "optimizer step"} <= set(seen["ticks"])
    assert seen["width"][0] <= seen["width"][1]
    assert min(seen["heights"]) > 100  # enlarged, because Chromium draws nothing in a viewBox lower than about one unit
    everything = [f"{run}{kind}" for run in "01" for kind in ("step", "train", "val")]
    assert seen["all"] == everything
    assert (seen["hidden"], seen["hiddenAgain"], seen["fits"]) == (True, True, True)
    assert seen["tip"] == [["step 400", ""], ["a-run-of-a-very-long-name-" * 4, "70"]]
    shown, pressed, ticks, tip = seen["one"]
    assert (shown, pressed) == (["0step", "0train", "0val"], "false")
    # "0.20" is labelled "0.2" if the ticks are so far apart that one decimal suffices.
    assert {"0.20", "0.40", "10", "40"} <= {*ticks, *(f"{tick}0" for tick in ticks)}
    assert "60" not in ticks
    assert tip == [["step 40", "logged steps", "training, epochs", "validation"], ["run-a", "0.025", "0.5", "0.4"]]
    assert seen["kinds"] == ["0train", "0val"]
    assert seen["again"] == [everything, seen["ticks"]]
    assert seen["alone"] == ["1step", "1train", "1val"]
    assert seen["whole"] == everything
    assert (seen["first"], seen["second"]) == ("step 10", "step 20")
