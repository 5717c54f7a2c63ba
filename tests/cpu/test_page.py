"""The page of `explain --html`: complete, self-contained, to scale, and looked at in a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fp8_steps import PAPER_FP8
from results import result_of, spread

from fagen.cli import run
from fagen.emit import emit
from fagen.explore.explain import explain
from fagen.explore.knob_lines import knob_lines, step_lines
from fagen.explore.page import page
from fagen.explore.shares import measured
from fagen.library import load
from fagen.plan import Plan, Problem, plan
from fagen.plan import steps as st
from fagen.plan.removal import without

PROBLEM = Problem(4, 4096, 4096, 16, 16)
BUILTIN = ("standard", "fa1", "fa2", "fa3", "fa3_fp8")


def page_of(name: str, with_times: bool = True, problem: Problem | None = PROBLEM, **changes: Any) -> tuple[Plan, str]:
    whole = plan(*load(name, **changes))
    found = None
    if with_times and problem is not None:
        plans = {name: (whole, problem, spread(3.0)), "part": (without(whole, "pv"), problem, spread(1.5))}
        found = measured(whole, problem, result_of(plans), "times.json")
    return whole, page(name, "", whole, explain(whole, problem=problem, measured=found))


class Document(HTMLParser):
    """Ids, links, tags and whether every element is closed."""

    EMPTY = ("meta", "rect", "line", "circle", "text")

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("href", "src") and value:
                self.links.append(value)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_page_is_whole_and_needs_nothing_else(name: str) -> None:
    whole, text = page_of(name)
    found = Document(text)
    assert not found.open and len(set(found.ids)) == len(found.ids)
    assert not {"script", "link", "img", "iframe"} & found.tags and "@import" not in text and "url(" not in text
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"] * text.count("<svg")
    words = " ".join(found.words)
    for title in ("Two values", "What binds", "Shared memory", "Registers", "Barriers", "Loop nest", "Code", "Roofline"):
        assert title in words
    for field, value in whole.schedule.to_dict().items():
        assert field in words and (str(value) in words or isinstance(value, list))
    for kernel in whole.kernels:
        for bar in kernel.mbars:
            assert bar.name in words
    assert "without P·V" in words and "measured" in words
    code = emit(whole, name).text.splitlines()
    assert [f"L{n}" for n in range(1, len(code) + 1)] == [i for i in found.ids if re.fullmatch(r"L\d+", i)]


def test_without_sizes_there_is_no_word_of_time() -> None:
    _, text = page_of("fa3", problem=None)
    assert "What binds" not in text and "Roofline" not in text and "Loop nest" in text


def test_the_memory_map_is_to_scale() -> None:
    whole, text = page_of("fa3")
    (kernel,) = whole.kernels
    svg = text[text.index("Shared memory of kernel attention") :].split("</svg>")[0]
    boxes = [
        (float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="18" width="([\d.]+)" height="44" class="tile k', svg)
    ]
    slots = [(t.offset + i * t.tile_bytes, t.tile_bytes) for t in kernel.smem for i in range(t.stages)]
    scale = 1000 / whole.target.smem_bytes
    for (x, width), (offset, size) in zip(boxes, slots, strict=True):
        assert x == pytest.approx(offset * scale, abs=0.01)
        assert width == pytest.approx(max(size * scale - 1, 1), abs=0.01)


def test_the_page_shows_what_is_said_of_the_time() -> None:
    _, text = page_of("fa3")
    assert "−50.0 %" in text and "as the model says" in text and "times.json" in text
    _, text = page_of("fa3", with_times=False)
    assert "What each part takes" not in text and "of the bound" in text


# knobs behind lines -------------------------------------------------------------------------------------------------------


def lines_of(name: str, **changes: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    whole = plan(*load(name, **changes))
    source = emit(whole, name)
    knobs = knob_lines(whole, source)
    return ((line, knobs.get(n, ())) for n, line in enumerate(source.text.splitlines(), 1))


def test_the_knobs_behind_lines_of_fa3() -> None:
    found = {line.strip().split("//")[0].strip(): knobs for line, knobs in lines_of("fa3")}
    assert "registers" in found["setmaxnreg_inc<240>();"]
    assert found["Cursor<2> k{0, 0};"] == ("stages",)
    assert "scale" in found["#define SCALE_LOG2 0.127517431f"]
    assert {"tile_kv", "head_dim"} <= set(next(k for line, k in found.items() if line.startswith("float S[88], O[64], m_ref[2]")))
    assert {"overlap", "consumers"} <= set(found["bar_arrive(1 + (w + 1) % 2, 256);"])
    assert found["wgmma_wait<1>(), pin(S);"] == ("overlap",) and found["fill(m_ref, NEG_INF);"] == ()
    assert "reference" in found["rescale(O, alpha);"]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("standard", {"softmax", "tile_kv", "head_dim", "mask", "dtype"}),
        ("fa1", {"loop_order", "tile_q", "tile_kv", "normalise", "movement", "parallelism", "mask"}),
        ("fa2", {"stages", "movement", "normalise", "warps", "tile_q", "tile_kv", "parallelism"}),
        ("fa3", {"roles", "overlap", "parallelism", "stages", "tile_q", "consumers", "tile_kv", "reference", "registers"}),
        ("fa3_fp8", {"stages", "stages_q", "parallelism", "tile_kv", "reference"}),
        (PAPER_FP8, {"v_transposed", "overlap", "stages", "parallelism", "tile_kv", "reference"}),
    ],
)
def test_every_knob_that_can_change_is_behind_a_line(name: str, knobs: set[str]) -> None:
    assert knobs <= {k for _, of in lines_of(name) for k in of}


@pytest.mark.parametrize("name", BUILTIN)
def test_steps_are_found_in_the_code(name: str) -> None:
    whole = plan(*load(name))
    source = emit(whole, name)
    lines, where = source.text.splitlines(), step_lines(whole, source)
    for kernel in whole.kernels:
        for role in kernel.roles:
            printed = list(st.walk(st.without_unused(role.body)))
            assert [s.id for s in printed if (kernel.name, s.id) not in where] == []
            places = [where[kernel.name, s.id] for s in printed]
            assert places == sorted(places), "in the order of the program"
            for s in printed:
                if isinstance(s, st.Loop):
                    assert f"[{s.id}]" in lines[where[kernel.name, s.id] - 1] or f"[{s.id}]" in lines[where[kernel.name, s.id]]


# the command, and a browser -----------------------------------------------------------------------------------------------

BROWSER = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
LOOK = """
<script>
addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  const out = [];
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    for (const part of svg.querySelectorAll("text")) {
      const b = part.getBoundingClientRect();
      if (b.width && (b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1)) out.push(part.textContent);
    }
  }
  const chips = [...document.querySelectorAll(".code .chip")].map(c => c.getBoundingClientRect());
  const hidden = chips.filter(c => c.right > innerWidth || c.left < 0).length;
  const heights = [...document.querySelectorAll("section")].map(s => Math.round(s.getBoundingClientRect().height));
  document.body.insertAdjacentHTML("beforeend", `<pre id="seen">${JSON.stringify({wide, out, heights, chips: chips.length, hidden})}</pre>`);
});
</script>
"""


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fa2.html"
    assert run(["explain", "fa2", "--no-compile", "--shape", "1,16,16,4096,4096", "--html", str(path)]) == 0
    assert f"{path}: open it in a browser" in capsys.readouterr().out
    assert not Document(path.read_text(encoding="utf-8")).open


@pytest.mark.skipif(BROWSER is None, reason="no browser: neither chromium nor google-chrome is installed")
@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("name", ["fa3", "standard"])
def test_a_browser_shows_it_whole(name: str, width: int, tmp_path: Path) -> None:
    """Nothing sticks out of the page or of a picture, every section has a height, and the picture of the page is no blank."""
    _, text = page_of(name)
    looked = tmp_path / "page.html"
    looked.write_text(text.replace("</body>", LOOK + "</body>"), encoding="utf-8")
    dom = browse(tmp_path, width, "--dump-dom", looked.as_uri())
    seen = json.loads(re.findall(r'<pre id="seen">(.*?)</pre>', dom)[-1])
    assert seen["wide"] <= 0 and seen["out"] == []
    assert seen["chips"] > 50 and seen["hidden"] == 0, "the knobs stand where they can be seen without scrolling"
    assert len(seen["heights"]) == 8 and min(seen["heights"]) > 60
    picture = tmp_path / "page.png"
    browse(tmp_path, width, f"--screenshot={picture}", looked.as_uri())
    assert colours(picture) > 20


def browse(tmp_path: Path, width: int, *arguments: str) -> str:
    assert BROWSER is not None
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-quic")
    size = (f"--window-size={width},2400", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", *quiet, *size, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def colours(path: Path) -> int:
    """Different colours in a PNG, from its bytes: whole pixels where filters allow, which is enough to tell a page from a blank."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += 12 + size
    raw = zlib.decompress(packed)
    return len({raw[i : i + 3] for i in range(0, len(raw) - 3, 97)})
