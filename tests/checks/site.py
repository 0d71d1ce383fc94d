#!/usr/bin/env python3
"""The site that tools/docs makes: every link leads to a file and an anchor; at the width of a phone no page scrolls
sideways; the search finds a field, an argument, a variable and a code. The last two take chromium."""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHONE = 360  # CSS pixels
SKIPPED = 77
WANTED = {"kv_scale": "tools/reference/spec.html", "append_positions": "tools/reference/arguments.html",
          "FLASHJIT_CACHE_PATH": "tools/reference/environment.html", "not_prebuilt": "tools/reference/codes.html",
          "--verify-rows": "tools/reference/command.html"}
# Says from within a page whether it is wider than its window, and what the search finds first.
REPORT = """<script>
addEventListener("load", async () => {
  const root = document.documentElement;
  const found = {};
  for (const word of WANTED) {
    document.getElementById("search").value = word;
    await search();
    found[word] = [...document.querySelectorAll("#found a")].map((link) => link.getAttribute("href"));
  }
  document.getElementById("search").value = "";
  await search();
  parent.postMessage([PAGE, root.scrollWidth, root.clientWidth, found], "*");
});
</script>"""
FRAMES = """<!DOCTYPE html><body><pre id="said"></pre><script>
const said = [];
addEventListener("message", (event) => {
  said.push(event.data);
  document.getElementById("said").textContent = JSON.stringify(said);
});
for (const page of PAGES) {
  const frame = document.createElement("iframe");
  frame.src = page;
  frame.style = "width: WIDTHpx; height: 640px; border: 0";
  document.body.append(frame);
}
</script></body>"""


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.links.append(value)


def broken_links(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = Path(os.path.normpath(path.parent / name)) if name else path
            if not target.is_file() or (target in pages and anchor not in pages[target].anchors):
                wrong.append(f"{path.relative_to(site)}: {link} leads nowhere")
    return wrong


def in_a_browser(browser, site):
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    for page in pages:
        wanted = list(WANTED) if page == "index.html" else []
        report = REPORT.replace("WANTED", json.dumps(wanted)).replace("PAGE", json.dumps(page))
        path = site / page
        path.write_text(path.read_text().replace("</body>", report + "</body>"))
    frames = FRAMES.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(PHONE))
    (site / "frames.html").write_text(frames)
    shown = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom",
         f"--user-data-dir={site.parent}/profile", (site / "frames.html").as_uri()],
        capture_output=True, text=True, check=True, timeout=300).stdout
    said = json.loads(html.unescape(re.search(r'<pre id="said">(.*?)</pre>', shown, re.S)[1]) or "[]")
    wrong = [f"{page}: the browser did not show it" for page in set(pages) - {page for page, *_ in said}]
    for page, width, window, found in said:
        if width > window:
            wrong.append(f"{page}: {width} pixels wide in a window of {window}")
        for word, links in found.items():
            if not any(link.split("#")[0].endswith(WANTED[word]) for link in links[:5]):
                wrong.append(f"the search for {word} finds {links[:5]}, not {WANTED[word]}")
    return wrong


def main():
    if not shutil.which("pandoc"):
        print("skipped: there is no pandoc")
        return SKIPPED
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([ROOT / "tools/docs", work], check=True)
        site = Path(work) / "html"
        wrong = broken_links(site)
        browser = shutil.which("chromium") or shutil.which("chromium-browser")
        if browser:
            wrong += in_a_browser(browser, site)
        else:
            print("there is no chromium: links were checked, widths and the search were not")
        for text in wrong:
            print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
