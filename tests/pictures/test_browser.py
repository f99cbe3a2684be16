"""Pages as a reader's browser has them: Chromium, light and dark, narrow and wide."""

import json
import shutil
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from colours import contrast
from data import VARIED
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from spu_llm.cli import main
from spu_llm.experiment import render_report

_QUIET = ("gpu", "quic", "background-networking", "component-update", "sync", "default-apps", "extensions", "dev-shm-usage")
_OPTIONS = ("--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in _QUIET))
_LEAST = 4.5  # WCAG AA, of text
PAGES = ["report", "index"]
FAULTY = """<!doctype html><html lang="en"><title>x</title><body style="background: #fff">
<script>console.warn("watch out")</script><img src="http://127.0.0.1:9/outside.png">
<p style="color: #999">faint</p><p style="color: #000">plain</p><div style="width: 2000px">wide</div>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium with a profile of its own. It is needed: without it tests fail rather than say nothing of the pages."""
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or driver is None:
        pytest.fail("chromium or chromedriver is missing, in which pages are opened; run `make browser`", pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*_OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    yield running
    running.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A folder: report.html of committed metrics, with a baseline and a variant, and index.html of all results."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "report.html").write_text(render_report(VARIED))
    done = CliRunner().invoke(main, ["reproduce", "--page", "--out", str(folder)], catch_exceptions=False)
    assert (folder / "index.html").is_file(), done.output  # whether all results are whole is tests/reproduce's business
    return folder


def opened(browser, page, width=1280, scheme="light"):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for log in ("browser", "performance"):
        browser.get_log(log)  # what came before is of another page
    browser.get(page.as_uri())


def asked(browser):
    """Addresses that were asked for, but for files and what a page holds itself."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    found = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert found  # the page itself, or nothing would be seen at all
    return [url for url in found if not url.startswith(("file:", "data:"))]


def overhang(browser, width):
    return browser.execute_script("return document.documentElement.scrollWidth") - width


_SEEN = r"""
const number = text => text.match(/[\d.]+/g).map(Number);
const solid = e => { const c = number(getComputedStyle(e).backgroundColor); return c.length < 4 || c[3] > .5 ? c : null; };
const behind = e => e ? solid(e) || behind(e.parentElement) : null;
const text = e => [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim());
const colour = e => number(e.ownerSVGElement ? getComputedStyle(e).fill : getComputedStyle(e).color);
const all = [...document.body.querySelectorAll('*:not(script)')].filter(text).filter(e => e.checkVisibility());
return all.map(e => [e.tagName, colour(e), behind(e)]);
"""


def faint(seen):
    return [each for each in seen if contrast(each[1][:3], each[2][:3]) < _LEAST]


def test_faults_are_seen(browser, tmp_path):
    """What the other tests look for is found where it is."""
    page = tmp_path / "faulty.html"
    page.write_text(FAULTY)
    opened(browser, page)
    assert any("watch out" in entry["message"] for entry in browser.get_log("browser"))
    assert asked(browser) == ["http://127.0.0.1:9/outside.png"]
    assert overhang(browser, 1280) > 500
    assert [tag for tag, _, _ in faint(browser.execute_script(_SEEN))] == ["P"]


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_complained_of_and_nothing_asked_for(browser, pages, name):
    opened(browser, pages / f"{name}.html")
    assert browser.get_log("browser") == []
    assert asked(browser) == []


def counted(page):
    found = {}
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, _: found.update({tag: found.get(tag, 0) + 1})
    parser.feed(page.read_text())
    return found


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_tables_and_plots_are_seen_and_nothing_sticks_out(browser, pages, name, width):
    page = pages / f"{name}.html"
    opened(browser, page, width)
    assert overhang(browser, width) <= 0
    browser.execute_script("[...document.querySelectorAll('details')].forEach(each => each.open = true)")
    assert overhang(browser, width) <= 0
    sizes = "return [...document.querySelectorAll(arguments[0])].map(e => e.getBoundingClientRect()).map(r => [r.width, r.height])"
    for tag, least in (("table", 3), ("svg", 2), ("img", 0)):
        found = browser.execute_script(sizes, tag)
        assert len(found) == counted(page).get(tag, 0) >= least
        assert all(wide > 50 and high > 20 for wide, high in found), (tag, found)
    assert browser.execute_script("return [...document.images].every(each => each.naturalWidth > 0)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_text_is_readable(browser, pages, name, scheme):
    """Every text on the page and in its pictures, against what is behind it."""
    opened(browser, pages / f"{name}.html", scheme=scheme)
    seen = browser.execute_script(_SEEN)
    assert {"P", "TD", "text"} <= {tag for tag, _, _ in seen}
    assert faint(seen) == []
    page = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (page != "rgb(255, 255, 255)") == (scheme == "dark")
