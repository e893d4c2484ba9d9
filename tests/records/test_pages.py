"""The pages, in a real browser: what they show, how quickly, without a network, to whoever uses them.

The browser is Chromium (apt-get install chromium), by Playwright; axe-core looks for what shuts people out.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.command import DataError
from records import excerpts, pictures
from records.archive.metrics import find_runs
from records.board import site
from records.board import tables as board
from records.compare import __main__ as compare
from records.compare import page
from tests.kit.helpers import ROOT
from tests.kit.metrics_kit import edit_events, write_run

STEPS, STALL = 10_000, 500
SHAPES = [("light", 1200), ("dark", 1200), ("light", 390)]
FRAME = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"  # until one was drawn
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


# --- without a browser ------------------------------------------------------------------------------------


def data_of(path: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*)</script>', path.read_text())
    return json.loads(found[1])


def test_thinning_keeps_the_ends_and_all_extremes():
    values = np.sin(np.arange(10_000) / 50)
    values[1234], values[7777], values[99] = 50.0, -50.0, np.nan
    places = page.thin(values, 100)
    assert {0, 1234, 7777, 9999} <= set(places.tolist()) and len(places) <= 202
    assert page.thin(values[:150], 100).tolist() == [*range(150)]
    assert len(page.thin(np.full(1000, np.nan), 10)) <= 22


def test_names_are_never_markup(tmp_path):
    run = write_run(tmp_path / "<img src=x onerror=alert(1)></script>"[:28])
    compare.main([str(run), "--", str(run), "--html", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert "<img" not in text
    assert "<script>alert" not in site.markdown("<script>alert(1)</script>\n\n[x](javascript:alert(1))")
    assert "javascript:" not in re.sub(r"\[x\]\(.*?\)", "", site.markdown("[x](javascript:alert(1))"))


def test_losses_that_are_not_finite_make_a_gap(tmp_path):
    run = edit_events(
        write_run(tmp_path / "a"), lambda e: e | {"train_loss": "inf"} if e.get("step") == 9 else e
    )
    compare.main([str(run), "--", str(run), "--html", str(tmp_path / "page.html")])
    assert data_of(tmp_path / "page.html")["runs"][0]["loss"]["y"][8] is None


def test_the_pictures_of_the_readme_are_of_the_records_that_are_here(tmp_path, capsys):
    assert pictures.main(["--check"]) == 0
    shutil.copytree(ROOT / "records/track_floppy", tmp_path / "track_floppy")
    assert pictures.main(["--check", "--records", str(tmp_path)]) == 1
    assert "ladder.svg: is not up to date" in capsys.readouterr().out


def test_a_sample_of_a_folder_that_changed_is_not_shown(tmp_path):
    track = board.load_track(ROOT / "records/track_floppy")
    kept = excerpts.read_excerpts(track)
    assert "2026-11-22_Par" in kept
    shutil.copytree(track.folder, tmp_path / "track_floppy")
    copy = board.load_track(tmp_path / "track_floppy")
    (copy.folder / "2026-11-22_Par/train_gpt.py").write_text("# another")
    assert excerpts.read_excerpts(copy).keys() == kept.keys() - {"2026-11-22_Par"}
    (copy.folder / "excerpts.json").write_text('{"x": {"text": 1}}')
    with pytest.raises(DataError, match="no whole sample"):
        excerpts.read_excerpts(copy)


@pytest.mark.slow
def test_a_record_with_metrics_of_its_own_kind_has_a_page_without_curves(tmp_path):
    shutil.copytree(ROOT / "records/track_floppy", tmp_path / "track_floppy")
    folder = tmp_path / "track_floppy/2026-11-22_Par"
    path = folder / "metrics_seed1337.jsonl"
    path.write_text(path.read_text().replace('"train_loss"', '"nll"'))
    assert board.main(["--records", str(tmp_path), "--html", str(tmp_path / "site")]) == 0
    text = (tmp_path / "site/track_floppy/2026-11-22_Par.html").read_text()
    assert "Its metrics have no curves: metrics_seed1337.jsonl:1" in text


@pytest.mark.slow
def test_the_first_page_may_have_a_name_of_its_own(tmp_path, capsys):
    assert board.main(["--html", str(tmp_path / "board.html")]) == 0
    assert "pages written" in capsys.readouterr().out
    assert 'href="../board.html"' in next((tmp_path / "track_floppy").glob("*.html")).read_text()


# --- in a browser -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: tests/requirements.txt")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def big_page(tmp_path_factory):
    """Ten runs of 10,000 steps, one of them with a stall."""
    folder = tmp_path_factory.mktemp("pages")
    sides = []
    for side, seconds in (("a", 0.25), ("bb", 0.27)):
        made = [
            write_run(
                folder / f"{side}{seed}", seed, STEPS, seconds, stalls={STALL: 40.0} if seed == 3 else {}
            )
            for seed in range(1, 6)
        ]
        sides.append([str(run) for run in made])
    path = folder / "big.html"
    assert compare.main([*sides[0], "--", *sides[1], "--html", str(path)]) == 1
    return path


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert board.main(["--html", str(folder)]) == 0
    return folder


class Tab:
    """A page that is open, and what went wrong in it."""

    def __init__(self, browser, path: Path, scheme: str = "light", width: int = 1200):
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        self.tab = self.context.new_page()
        self.wrong = []
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("console", lambda line: self.wrong.append(line.text))
        self.tab.on("request", lambda request: self.asked(request.url))
        self.tab.goto(path.as_uri())
        self.tab.wait_for_selector("html[data-ready]")
        self.tab.wait_for_timeout(100)

    def asked(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.wrong.append(f"asked for {url}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


def least_ms(tab, action: str, times: int = 5) -> float:
    """Milliseconds of the page's own work on an action, with the frame that shows it.

    The least of some: other tests run beside this one.
    """
    code = f"""async () => {{
        const began = performance.now();
        {action};
        await {FRAME};
        return performance.now() - began;
    }}"""
    return min(tab.evaluate(code) for _ in range(times))


@pytest.mark.slow
@pytest.mark.parametrize("scheme, width", SHAPES)
def test_every_page_opens_from_disk_and_shuts_nobody_out(browser, big_page, site_folder, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    records = sorted(site_folder.glob("*/*.html"))
    opened = records[:1] if scheme == "dark" else records  # which differ in nothing that the dark changes
    for path in (big_page, site_folder / "index.html", *opened):
        with Tab(browser, path, scheme, width) as it:
            assert it.wrong == []
            assert it.tab.evaluate("document.documentElement.scrollWidth") <= width
            if path in records[1:]:  # they are made alike
                continue
            for more in it.tab.locator("summary").all():
                more.click()
            found = axe.Axe().run(it.tab).response["violations"]
            bad = [
                (one["id"], one["nodes"][0]["html"][:200])
                for one in found
                if one["impact"] in ("serious", "critical")
            ]
            assert bad == [], path.name


@pytest.mark.slow
def test_ten_long_runs_are_small_quick_and_whole(browser, big_page):
    assert big_page.stat().st_size < 1_000_000
    runs = data_of(big_page)["runs"]
    assert [run["stalls"]["x"] for run in runs].count([STALL]) == 2
    assert max(max(run["time"]["y"]) for run in runs) > 40_000
    with Tab(browser, big_page) as it:
        toggle = "document.querySelectorAll('[name=run]')[2].click()"
        switch = "const all = document.querySelectorAll('[name=axis]'); all[(all[0].checked ? 2 : 0)].click()"
        hover = """const over = document.querySelector('.u-over'); const box = over.getBoundingClientRect();
            const at = {clientX: box.left + Math.random() * box.width, clientY: box.top + 50, bubbles: true};
            over.dispatchEvent(new MouseEvent('mousemove', at))"""
        zoom = "document.querySelector('.tools button').click()"
        spent = {
            name: least_ms(it.tab, action)
            for name, action in (("run", toggle), ("axis", switch), ("hover", hover), ("zoom", zoom))
        }
        print(spent)
        assert max(spent.values()) < 200, spent


@pytest.mark.slow
def test_runs_axes_and_zoom_by_mouse_and_keyboard(browser, big_page):
    with Tab(browser, big_page) as it:
        tab = it.tab
        box = tab.locator("[data-chart=loss]")
        readout = tab.locator(".readout").first

        def press(key: str) -> None:
            tab.keyboard.press(key)
            tab.evaluate(f"() => {FRAME}")

        box.focus()
        press("End")
        assert "steps 10" in readout.inner_text() and "bb5" in readout.inner_text()
        tab.get_by_label("bb5", exact=True).uncheck()
        press("Tab")
        box.focus()
        press("ArrowLeft")
        assert "bb5" not in readout.inner_text() and "bb4" in readout.inner_text()
        table = tab.locator("details").first
        table.locator("summary").click()
        table.locator("thead th").first.wait_for()  # it is filled as it opens
        assert table.locator("thead th").count() == 10
        tab.get_by_label("seconds of training").check()
        tab.evaluate(f"() => {FRAME}")
        assert "seconds" in table.locator("thead th").first.inner_text()
        over = tab.locator("[data-chart=loss] .u-over").bounding_box()
        y = over["y"] + 50
        tab.mouse.move(over["x"] + over["width"] * 0.4, y)
        tab.mouse.down()
        tab.mouse.move(over["x"] + over["width"] * 0.6, y, steps=5)
        tab.mouse.up()
        tab.evaluate(f"() => {FRAME}")
        places = []
        for key in ("Home", "0", "Home", "End", "+", "Home"):
            box.focus()
            press(key)
            places.append(readout.locator("b").first.inner_text())
        assert places[2] not in (places[0], places[5]) and it.wrong == []


@pytest.mark.slow
def test_a_chart_says_what_was_measured_where_it_was(browser, tmp_path):
    """Of the right step, none after a run's end, and none of a validation before there was one."""
    long, short = write_run(tmp_path / "long", 1, 1000), write_run(tmp_path / "short", 1, 40)
    path = tmp_path / "page.html"
    compare.main([str(long), "--", str(short), "--html", str(path)])
    with Tab(browser, path) as it:
        tab = it.tab

        def read(kind: str, *pressed: str) -> str:
            tab.locator(f"[data-chart={kind}]").focus()
            for key in pressed:
                tab.keyboard.press(key)
            return tab.locator(f"section:has([data-chart={kind}]) .readout").inner_text()

        losses = find_runs(long)[0].table["train_loss"]
        last = f"{losses[-8:].mean():.5g}"
        assert re.search(
            rf"steps 1,000, means of \d+ to \d+ steps\s+long {last}\s+short ended", read("loss", "End")
        )
        assert "short ended" not in read("loss", "Home")
        assert re.search(r"steps 8\s+short", read("bpb", "Home"))  # long is validated first at 200
        assert [read("bpb", "ArrowRight").split("\n")[0][:9] for _ in range(4)][-1] == "steps 40 "
        assert re.search(r"long [\d.]+\s+short [\d.]+ at 40", read("bpb", "ArrowRight"))
        for axis in ("seconds of training", "operations"):
            tab.get_by_label(axis).check()
            assert re.search(rf"{axis} .*\s+long {last}\s+short ended", read("loss", "End"))
        tab.get_by_label("long", exact=True).uncheck()
        tab.emulate_media(color_scheme="dark")
        assert re.search(r"operations .*\s+short ended$", read("loss"))
        assert re.search(r"operations .*\s+short ended$", read("loss", "ArrowRight"))
        assert it.wrong == []


@pytest.mark.slow
def test_nothing_moves_while_values_are_read_and_a_zoom_outlives_the_window(browser, tmp_path):
    run, path = write_run(tmp_path / ("x" * 180)), tmp_path / "page.html"
    compare.main([str(run), "--", str(run), "--html", str(path)])
    shown = "plots.map((chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max])"
    with Tab(browser, path, width=390) as it:
        tab = it.tab
        box = tab.locator("[data-chart=rate]")
        before = box.bounding_box()
        for chart in tab.locator("[data-chart] .u-over").all():
            chart.hover()
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        assert tab.evaluate("window.scrollY") >= 0 and box.bounding_box()["width"] == before["width"]
        tab.locator("[data-chart=loss]").focus()
        for key in ("Home", "+", "+"):
            tab.keyboard.press(key)
        zoomed = tab.evaluate(shown)
        assert zoomed[0][1] < 60 and zoomed == [zoomed[0]] * 4
        tab.set_viewport_size({"width": 700, "height": 500})
        tab.emulate_media(color_scheme="dark")
        tab.wait_for_timeout(300)
        assert tab.evaluate(shown) == zoomed
        tab.locator("[data-chart=time] .u-over").dblclick()
        assert tab.evaluate(shown) == [[1, 60]] * 4 and it.wrong == []


@pytest.mark.slow
def test_a_run_of_one_step_can_be_zoomed(browser, tmp_path):
    one, path = write_run(tmp_path / "one", 1, steps=1), tmp_path / "page.html"
    assert compare.main([str(one), "--", str(one), "--html", str(path)]) == 0
    with Tab(browser, path) as it:
        it.tab.locator("[data-chart=loss]").focus()
        for key in ("+", "-", "0", "End"):
            it.tab.keyboard.press(key)
        over = it.tab.locator("[data-chart=loss] .u-over").bounding_box()
        for act, part in ((it.tab.mouse.move, 0.6), (it.tab.mouse.down, 0), (it.tab.mouse.move, 0.8)):
            act(*([over["x"] + part * over["width"], over["y"] + 50] if part else []))
        it.tab.mouse.up()
        it.tab.keyboard.press("0")
        it.tab.evaluate(f"() => {FRAME}")
        assert it.tab.evaluate("plots.map((chart) => chart.plot.scales.x.min)") == [0] * 4
        assert it.wrong == []


@pytest.mark.slow
def test_points_of_the_board_lead_to_the_records(browser, site_folder):
    with Tab(browser, site_folder / "index.html") as it:
        links = it.tab.locator("a.mark")
        assert links.count() == 2 * len(list(site_folder.glob("track_*/*.html")))
        assert "bits per byte" in links.first.get_attribute("aria-label")
        names = {link.inner_text() for link in links.all()}
        links.first.focus()
        it.tab.keyboard.press("Enter")
        it.tab.wait_for_selector("html[data-ready]")
        assert it.tab.locator("h1").inner_text() in names
        text = it.tab.locator("main").inner_text()
        assert all(
            title in text for title in ("Why", "Scores", "Curves", "What the model writes", "Its README")
        )
        it.tab.get_by_text("All records").click()
        it.tab.wait_for_selector("a.mark")
        assert it.wrong == []
