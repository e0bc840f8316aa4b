"""The page of examples/web, served from a plain static server and driven in a real Chromium."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from onnxplain.contract import KEY

__all__ = ["SCENES", "Page", "build", "changed", "chromium", "serve"]

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "web"
SCENES = sorted((EXAMPLE / "scenes").glob("*.png"))
PATIENCE = 120  # seconds; a job takes one or two

# What the page holds, as JSON can hold it.
_SHOWN = """
const done = arguments[0];
import("./app.js").then(({ state: { shown } }) => {
  const list = (array) => array && [...array];
  const maps = [...shown.maps].map(([method, { raw, heatmap }]) => [
    method,
    { raw: raw && { ...raw, data: list(raw.data) }, heatmap: list(heatmap) },
  ]);
  const { target, method, probabilities } = shown;
  const [model, picture] = [shown.model.name, shown.picture.name];
  const logits = list(shown.logits);
  done({ model, picture, target, method, logits, probabilities, maps: Object.fromEntries(maps) });
});
"""

_DROP = """
const [name, bytes] = arguments;
const transfer = new DataTransfer();
transfer.items.add(new File([Uint8Array.from(bytes)], name));
const target = document.querySelector("main");
for (const kind of ["dragover", "drop"]) {
  const event = new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
  target.dispatchEvent(event);
}
"""


def _found(*programs: str) -> str:
    """The first of the programs that is installed; without any, the test is skipped."""
    for program in programs:
        if path := shutil.which(program):
            return path
    pytest.skip(f"needs {programs[0]}, which is not installed")


def build(folder: Path) -> None:
    """Puts the page together in a folder."""
    _found("node")
    if not (EXAMPLE / "node_modules" / "onnxruntime-web").is_dir():
        pytest.skip("needs onnxruntime-web: npm ci in examples/web")
    command = [_found("npm"), "run", "build", "--", str(folder)]
    subprocess.run(command, cwd=EXAMPLE, check=True, capture_output=True)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The folder's address while it is served as `python -m http.server` does it."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A driver of a headless Chromium with an empty profile."""
    reason = "needs selenium, which is not installed"
    webdriver = pytest.importorskip("selenium.webdriver", reason=reason)
    service = pytest.importorskip("selenium.webdriver.chrome.service", reason=reason)
    options = webdriver.ChromeOptions()
    options.binary_location = _found("chromium", "chromium-browser", "google-chrome")
    for argument in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=service.Service(_found("chromedriver")))
    try:
        driver.set_script_timeout(PATIENCE)
        yield driver
    finally:
        driver.quit()


@dataclass(frozen=True)
class Page:
    """The page as a user has it: what can be done with it, and what it shows."""

    driver: Any
    address: str

    def open(self, query: str = "") -> Page:
        self.driver.get(self.address + query)
        return self.settle()

    def settle(self) -> Page:
        """Waits for whatever the page is doing."""
        wait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
        idle = "return document.body.ariaBusy === 'false'"
        wait(self.driver, PATIENCE, 0.02).until(lambda driver: driver.execute_script(idle))
        return self

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def picture(self, path: Path) -> Page:
        """By the file picker."""
        self.find("#picture-file").send_keys(str(path))
        return self.settle()

    def model(self, path: Path) -> Page:
        """By the file picker."""
        self.find("#model-file").send_keys(str(path))
        return self.settle()

    def drop(self, name: str, content: bytes) -> Page:
        self.driver.execute_script(_DROP, name, list(content))
        return self.settle()

    def choose(self, what: str, value: Any) -> Page:
        """An option of the select "class" or "method"."""
        self.find(f"#{what} option[value='{value}']").click()
        return self.settle()

    def run(self, script: str, *arguments: Any) -> Any:
        """What the script, which has the arguments as `a`, `b`, ..., gives to `done`."""
        names = ", ".join([*"abcd"[: len(arguments)], "done"])
        return self.driver.execute_async_script(
            f"const [{names}] = arguments; {script}", *arguments
        )

    @property
    def status(self) -> str:
        return str(self.find("#status").text)

    @property
    def error(self) -> str:
        return str(self.find("#error").text)

    @property
    def complaints(self) -> list[str]:
        """What the page wrote to the browser's console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    @property
    def shown(self) -> dict[str, Any]:
        """What is explained: names, target, logits, and for each method `raw` and `heatmap`."""
        shown = dict(self.driver.execute_async_script(_SHOWN))
        size = self.run(
            "import('./app.js').then(({ state }) => done(state.shown.model.contract.input.size))"
        )
        for one in shown["maps"].values():
            if raw := one["raw"]:
                one["raw"] = np.reshape(raw["data"], (raw["rows"], raw["columns"]))
            if one["heatmap"] is not None:
                one["heatmap"] = np.reshape(one["heatmap"], size)
        return shown

    def overlay(self) -> NDArray[np.uint8]:
        """The pixels of the drawn map, [height, width, 4]."""
        width, height, data = self.driver.execute_script(
            """const canvas = document.getElementById("overlay");
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return [width, height, [...data]];"""
        )
        return np.array(data, np.uint8).reshape(height, width, 4)


def changed(path: Path, change: Callable[[onnx.ModelProto, dict[str, Any]], None]) -> Path:
    """The file after a change of the graph or of the contract's JSON."""
    model = onnx.load(path)
    (entry,) = (e for e in model.metadata_props if e.key == KEY)
    contract = json.loads(entry.value)
    change(model, contract)
    entry.value = json.dumps(contract)
    onnx.save(model, path)
    return path
