#!/usr/bin/env python3
"""page.py BUILD_FOLDER: `flashjit serve` on a socket that was passed as systemd does, which holds requests while no
service runs, and its page in a headless chromium: what happened is in its tables, what strangers sent is text, and at
the width of a phone nothing scrolls sideways."""

import html.parser
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PHONE = 360  # CSS pixels
SCRIPT = '<script>document.title = "ran"</script>'
SPEC = {"op": "copy_kv", "dtype": "fp32", "head_dim": 8}
CONFIG = {"num_stages": 1, "num_warps": 1, "q_in_registers": False, "ping_pong": False, "tile_order": "heads",
          "pack_gqa": False}
FRAME = """<!DOCTYPE html><pre id="said"></pre>
<iframe id="page" src="page.html" style="width: WIDTHpx; height: 640px; border: 0"></iframe>
<script>addEventListener("message", (event) => { document.getElementById("said").textContent = event.data; });</script>"""


class Tables(html.parser.HTMLParser):
    """The texts of the cells of each table by its id."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.title, self.tag = {}, "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tag = tag
        if tag == "table":
            self.cells = self.tables.setdefault(dict(attributes)["id"], [])
        elif tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.tag == "title":
            self.title += data
        elif self.tables:
            self.cells[-1] += data


class Service:
    """A service on a socket that this process holds."""

    def __init__(self, flashjit, work):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        subprocess.run([flashjit, "cache", "keygen", work / "key"], check=True, stdout=subprocess.DEVNULL)
        passed = self.listener.fileno()
        self.command = ["sh", "-c", f'LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@" 3<&{passed}', flashjit, "serve", "--key",
                        work / "key", "--cache-dir", work / "cache"]
        self.log = work / "log"
        self.process = None

    def start(self):
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stderr=log, pass_fds=(self.listener.fileno(),),
                                            env={**os.environ, "FLASHJIT_NVRTC": "/nonexistent"})

    def stop(self):
        self.process.terminate()
        self.process.wait(30)

    def send(self, method, path, body=None):
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        client.request(method, path, body and json.dumps(body))
        return client

    def ask(self, *request):
        answer = self.send(*request).getresponse()
        return answer.status, answer.read()


def in_a_browser(browser, work, page):
    shown = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom",
         f"--user-data-dir={work}/profile", page], capture_output=True, text=True, check=True, timeout=120)
    return shown.stdout


def check_page(service, browser, work):
    shown = Tables(in_a_browser(browser, work, f"http://127.0.0.1:{service.port}/"))
    assert shown.title == "flashjit serve", shown.title
    assert "compiled" in shown.tables["compiles"] and any("copy_kv" in cell for cell in shown.tables["compiles"])
    assert "400" in shown.tables["refused"], shown.tables
    assert any(SCRIPT in cell for cell in shown.tables["refused"]), shown.tables
    text = service.ask("GET", "/")[1].decode()
    report = "<script>parent.postMessage(`${document.documentElement.scrollWidth} ${innerWidth}`, '*')</script>"
    (work / "page.html").write_text(text.replace("</body>", report + "</body>"))
    (work / "frame.html").write_text(FRAME.replace("WIDTH", str(PHONE)))
    frame = in_a_browser(browser, work, (work / "frame.html").as_uri())
    width, window = map(int, re.search(r'id="said">(\d+) (\d+)', frame).groups())
    assert width <= window == PHONE, f"{width} pixels wide in a window of {window}"


def main():
    flashjit = Path(sys.argv[1]).resolve() / "bin/flashjit"
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder:
        service = Service(flashjit, Path(folder))
        early = service.send("GET", "/healthz")
        service.start()
        try:
            assert early.getresponse().read() == b"ok\n"
            version = subprocess.run([flashjit, "--version"], capture_output=True, text=True, check=True).stdout
            compile_it = {"version": version.split()[-1], "spec": SPEC, "target": "x86-64-v3", "config": CONFIG}
            status, made = service.ask("POST", "/compile?wait_ms=60000", compile_it)
            assert status == 200, made
            status, refused = service.ask("POST", "/compile", {**compile_it, SCRIPT: 1})
            assert status == 400, refused
            if browser:
                check_page(service, browser, Path(folder))
            service.stop()
            waits = service.send("POST", "/compile?wait_ms=60000", compile_it)
            service.start()
            assert waits.getresponse().read() == made
        except BaseException:
            print(service.log.read_text(), file=sys.stderr)
            raise
        finally:
            service.stop()
    if not browser:
        print("there is no chromium: the page was not shown")


if __name__ == "__main__":
    main()
