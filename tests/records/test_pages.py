"""The pages, in a real browser: what they show, how quickly, without a network, to whoever uses them.

The browser is Chromium (apt-get install chromium), by Playwright; axe-core looks for what shuts people out.
"""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest

from records.__main__ import main as records
from records.archive.tracks import load_track
from records.archive.verdicts import folder_sha256
from records.board import documents, entries, site
from tests.kit.helpers import ROOT
from tests.kit.metrics_kit import edit_events, write_run

FLOPPY = ROOT / "records/track_floppy"
STEPS, STALL = 10_000, 500
SHAPES = [("light", 1200), ("dark", 1200), ("light", 390)]
FRAME = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"  # until one was drawn
POINT = ".chart .mark-symbol.role-mark path"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PROGRAM_BYTES = 1_000_000  # the most that Vega may add to a page
HOSTILE = ["</script><script>window.hurt=1</script>", "<img src=x onerror=window.hurt=1>", "'\"&`${hurt}"]
HOSTILE += ["datum.at'] || window.hurt", "läuft-日本-\u202e\u2028", "a" * 180]


# --- without a browser ------------------------------------------------------------------------------------


def compared(base, new, page: Path) -> int:
    sides = [[str(run) for run in side] for side in (base, new)]
    return records(["compare", "--base", *sides[0], "--new", *sides[1], "--html", str(page)])


def curves_in(path: Path, quantity: str) -> list[dict]:
    """The curves of a panel, one of each run."""
    text = re.search(r'<script type="application/json" id="spec-curves">(.*)</script>', path.read_text())[1]
    return [row for row in json.loads(text)["datasets"]["curves"] if row["quantity"] == quantity]


def test_markdown_of_others_is_no_program():
    html = documents.markdown("<script>alert(1)</script>\n\n[x](javascript:alert(1)) ![i](https://x.y/i.png)")
    assert not re.search("<script|<img|href=.javascript", html)
    assert "<h3>Title</h3>" in documents.markdown("# Title")


@pytest.mark.slow
def test_losses_that_are_not_finite_make_a_gap(tmp_path):
    def fail(event):
        return event | {"train_loss": "inf"} if event.get("step") == 20 else event

    run = edit_events(write_run(tmp_path / "a", steps=20), fail)
    compared([run], [run], tmp_path / "page.html")
    assert curves_in(tmp_path / "page.html", "loss")[0]["value"][19] is None


def some_records(root: Path, *names: str) -> Path:
    """A copy of the floppy's track with some of its records."""
    track = root / "track_floppy"
    track.mkdir(parents=True)
    for name in ("track.json", "yardsticks.json"):
        shutil.copy(FLOPPY / name, track)
    for name in names:
        shutil.copytree(FLOPPY / name, track / name)
    verdicts = json.loads((FLOPPY / "verdicts.json").read_text())
    (track / "verdicts.json").write_text(json.dumps({name: verdicts[name] for name in names}))
    return track


def test_pictures_of_other_records_are_not_up_to_date(tmp_path, capsys):
    some_records(tmp_path, "2026-11-22_Par")
    shutil.copytree(ROOT / "records/images", tmp_path / "images")
    (tmp_path / "README.md").write_text("<!-- board -->\n<!-- /board -->\n")
    assert records(["board", "--check", "--records", str(tmp_path)]) == 1
    assert f"{tmp_path}/images/ladder.svg: is not up to date: " in capsys.readouterr().out


def test_only_too_little_gain_is_called_so():
    record = entries.Record(FLOPPY / "2026-11-22_Preset")
    small = {"verdict": "fails", "sha256": folder_sha256(record.path), "failed": ["gain"]}
    disputed = small | {"failed": ["gain", "proof"]}, small | {"disputed": "it looks ahead"}
    kinds = [entries.Entry(record, verdict).kind for verdict in (small, *disputed)]
    assert kinds == ["small", "disputed", "disputed"]


def test_the_best_record_s_page_has_its_diff_and_the_judge_s_scores_beside_its_own():
    """A script that stands first has no diff."""
    board = sorted(entries.load_entries(load_track(FLOPPY)), key=lambda one: one.mean)
    first, best = min(board, key=lambda one: one.name), board[0]
    assert site.script_changes(first) == []
    assert site.script_changes(best)[1] == f"+++ {best.name}/train_gpt.py"
    rows = site.scores(best)
    assert [row[1] for row in rows] == ["the judge"] * 3 + ["its author"] * 3
    scores = [*best.judged.values()], best.record.scores
    expected = [its["score"] for its in scores[0]] + [scores[1][seed] for seed in sorted(scores[1])]
    assert [row[2] for row in rows] == [f"{score:.6f}" for score in expected]
    page = site.record_page(best).decode()
    assert all(f"<bdi>{text}</bdi>" in page for row in rows for text in row)
    assert f"records sample records/track_floppy/{best.name} --prompt" in page
    assert site.excerpt(first.record).startswith("def read_file(path):")


@pytest.mark.parametrize("built_on", ["2026-11-22_Preset", "2020-01-01_Gone"])
def test_a_record_that_is_built_on_another_is_held_against_that(built_on):
    """One that names no folder of the track is held against the record before it."""
    before = built_on if (FLOPPY / built_on).exists() else "2026-11-22_Rung3-SlidingWindow"
    record = entries.Record(FLOPPY / "2026-11-22_Rung4-Lessons")
    record.submission.update(built_on=built_on, idea_from="<b>Ada</b>")
    entry = entries.Entry(record, {})
    page = site.record_page(entry).decode()
    assert "&lt;b&gt;Ada" in page and f"--- {before}/train_gpt.py" in page
    assert f"<bdi>{built_on}</bdi>" in page and f" Built on {built_on}." in entry.cells["what changed"]


# --- in a browser -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: tests/requirements.txt")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"needs a browser that starts: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def big_page(tmp_path_factory):
    """Ten runs of 10,000 steps, one of them with a stall."""
    folder = tmp_path_factory.mktemp("pages")
    sides = [], []
    for seed in range(1, 6):
        stalls = {STALL: 40.0} if seed == 3 else None
        for side, name, seconds in zip(sides, ("a", "bb"), (0.25, 0.27)):
            side.append(write_run(folder / f"{name}{seed}", seed, STEPS, seconds, stalls=stalls))
    assert compared(*sides, folder / "big.html") == 0
    return folder / "big.html"


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory):
    """The site of two records of which one has metrics of its own kind, and one a README that attacks."""
    folder = tmp_path_factory.mktemp("site")
    names = ("2026-11-22_Par", "2026-11-22_Preset")
    track = some_records(folder / "records", *names)
    metrics = track / names[1] / "metrics_seed1337.jsonl"
    metrics.write_text(metrics.read_text().replace('"train_loss"', '"nll"'))
    readme = track / names[0] / "README.md"
    readme.write_text("\n\n".join([readme.read_text(), *HOSTILE]))
    submission = track / names[0] / "submission.json"
    words = dict.fromkeys(("author", "what_changed", "why"), HOSTILE[0])
    submission.write_text(json.dumps(json.loads(submission.read_text()) | words))
    assert records(["board", "--records", str(folder / "records"), "--html", str(folder / "out")]) == 0
    return folder / "out"


@contextlib.contextmanager
def opened(browser, path: Path, scheme: str = "light", width: int = 1200):
    """A tab with a page, in which nothing goes wrong, and which asks no network for anything."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    tab = context.new_page()
    wrong = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda line: wrong.append(line.text))
    tab.on("request", lambda one: one.url.startswith(("file:", "data:")) or wrong.append(one.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-ready]")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    yield tab
    assert wrong == [] and tab.evaluate("window.hurt") is None
    context.close()


def places(tab) -> list[str]:
    """What stands at the horizontal axis of the first panel."""
    labels = "[...document.querySelectorAll('.role-axis-label')][0].querySelectorAll('text')"
    return tab.evaluate(f"{FRAME}.then(() => [...{labels}].map((one) => one.textContent))")


def drawn(tab) -> int:
    """Lines of the panels that are visible."""
    return tab.evaluate(f"{FRAME}.then(() => document.querySelectorAll('.chart .mark-line path[d]').length)")


@pytest.mark.slow
@pytest.mark.parametrize("scheme, width", SHAPES)
def test_every_page_opens_from_disk_and_shuts_nobody_out(browser, big_page, site_folder, scheme, width):
    """axe does not look into charts; their letters have the colours of the page's quiet text."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    for path in (big_page, site_folder / "index.html", *sorted(site_folder.glob("*/*.html"))):
        with opened(browser, path, scheme, width) as tab:
            for more in tab.locator("summary").all():
                more.click()
            found = axe.Axe().run(tab).response["violations"]
            grave = [one for one in found if one["impact"] in ("serious", "critical")]
            assert [(one["id"], one["nodes"][0]["html"][:200]) for one in grave] == [], path.name


@pytest.mark.slow
def test_names_of_others_are_never_markup_or_program(browser, tmp_path):
    """Names of settings and of runs, in tables, controls, tooltips and tables of numbers."""
    files = []
    for at, name in enumerate(HOSTILE):
        run = write_run(tmp_path / f"run{at}", at, settings={name: name})
        about = json.loads((run / "config.json").read_text())
        about["environment"] |= {name: name}
        (run / "config.json").write_text(json.dumps(about))
        files.append(tmp_path / (name.replace("/", "\u2215") + ".jsonl"))
        shutil.copy(run / "metrics.jsonl", files[-1])
        shutil.copy(run / "config.json", files[-1].with_suffix(".config.json"))
    page = tmp_path / "page.html"
    compared(files[:3], files[3:], page)
    assert "</script><script>window" not in page.read_text()
    assert "</script>" in HOSTILE[0]  # settings have it as it is
    with opened(browser, page, width=390) as tab:
        shown = tab.locator("main").inner_text()
        assert all(name in shown for name in HOSTILE[:4])
        tab.locator(POINT).last.hover(force=True)
        tab.locator("#vg-tooltip-element.visible").wait_for()
        assert tab.locator("img").count() == 0


@pytest.mark.slow
def test_ten_long_runs_are_small_and_whole(big_page):
    assert big_page.stat().st_size < PROGRAM_BYTES + 1_000_000
    times, losses = (curves_in(big_page, quantity) for quantity in ("time", "loss"))
    assert sum(max(row["high"]) > 40_000 for row in times) == 2, "a bucket has its extremes"
    assert [len(row["value"]) for row in losses] == [100] * 10 and losses[0]["step"][0] == 51


@pytest.mark.slow
def test_runs_axes_and_zoom(browser, big_page):
    with opened(browser, big_page) as tab:
        assert drawn(tab) == 4 * 10
        for name, count in (("new bb4", 1), ("new bb5", 2), ("new bb4", 1), ("new bb5", 10)):
            tab.locator(".role-legend-label text", has_text=name).click()
            assert drawn(tab) == 4 * count

        steps = places(tab)
        assert steps[-1] == "10,000"
        tab.get_by_label("steps", exact=True).focus()
        tab.keyboard.press("ArrowRight")
        assert places(tab)[-1] == "40M"  # of tokens
        tab.get_by_label("steps", exact=True).check()
        assert places(tab) == steps

        tab.locator(POINT).first.hover(force=True)
        tip = tab.locator("#vg-tooltip-element.visible").inner_text()
        assert "run" in tip and "step" in tip

        area = tab.locator(".chart .mark-line").first.bounding_box()
        tab.mouse.move(area["x"] + 0.5 * area["width"], area["y"] + 0.2 * area["height"])
        tab.keyboard.down("Control")
        tab.mouse.wheel(0, -300)
        tab.keyboard.up("Control")
        tab.wait_for_timeout(200)
        assert places(tab) != steps
        tab.mouse.dblclick(area["x"] + 0.5 * area["width"], area["y"] + 0.2 * area["height"])
        tab.wait_for_timeout(200)
        assert sorted(places(tab)) == sorted(steps), "Vega draws labels that come back after the others"


@pytest.mark.slow
def test_a_run_of_one_step_is_a_page_as_any_other(browser, tmp_path):
    one, path = write_run(tmp_path / "one", 1, steps=1), tmp_path / "page.html"
    assert compared([one], [one], path) == 0
    with opened(browser, path) as tab:
        assert drawn(tab) == 8


@pytest.mark.slow
def test_the_board_leads_to_the_records(browser, site_folder):
    with opened(browser, site_folder / "index.html") as tab:
        links = tab.locator("main a")
        assert [link.inner_text() for link in links.all()] == ["Preset", "Par"]
        links.last.focus()
        tab.keyboard.press("Enter")
        tab.wait_for_selector("h1:has-text('Par')")
        text = tab.locator("main").inner_text()
        heads = ("Why", "Scores", "Curves", "Its README")
        assert all(head in text for head in heads) and HOSTILE[0] in text
        tab.get_by_text("All records").click()
        point = tab.locator(POINT).first
        point.hover()
        assert "disputed" in tab.locator("#vg-tooltip-element.visible").inner_text()
        point.click()
        tab.wait_for_selector("h1:has-text('Par')")


@pytest.mark.slow
def test_a_site_holds_the_program_once_and_pages_without_curves(site_folder):
    pages = [*site_folder.rglob("*.html")]
    assert len(pages) == 3 and max(page.stat().st_size for page in pages) < 400_000
    assert 500_000 < (site_folder / "charts.js").stat().st_size < PROGRAM_BYTES
    text = (site_folder / "track_floppy/2026-11-22_Preset.html").read_text()
    assert "Its metrics have no curves: metrics_seed1337.jsonl:1" in text
