"""Pages as a reader's browser has them: Chromium, light and dark, narrow and wide."""

import shutil
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from colours import contrast
from data import LAN, VARIED
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from spu_llm.cli import main
from spu_llm.experiment import render_report

_QUIET = ("gpu", "quic", "background-networking", "component-update", "sync", "default-apps", "extensions", "dev-shm-usage")
_OPTIONS = ("--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in _QUIET))


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
    """Files by name: an experiment's report from committed metrics, the same with a variant, the page of all results."""
    folder = tmp_path_factory.mktemp("pages")
    for name, metrics in (("report", LAN), ("variants", VARIED)):
        (folder / f"{name}.html").write_text(render_report(metrics))
    done = CliRunner().invoke(main, ["reproduce", "--page", "--out", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return folder


def opened(browser, page, width=1280, scheme="light"):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


PAGES = ["report", "variants", "index"]


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_complained_of_and_nothing_asked_for(browser, pages, name):
    browser.get_log("performance")
    opened(browser, pages / f"{name}.html")
    assert browser.get_log("browser") == []
    asked = [entry["message"] for entry in browser.get_log("performance") if '"Network.requestWillBeSent"' in entry["message"]]
    assert asked and all('"url":"file:' in each or '"url":"data:' in each for each in asked)
    names = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(each.startswith(("file:", "data:")) for each in names)


def counted(page):
    found = dict.fromkeys(("table", "svg", "img"), 0)
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, _: found.update({tag: found.get(tag, 0) + 1})
    parser.feed(page.read_text())
    return found


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_tables_and_plots_are_seen_and_nothing_sticks_out(browser, pages, name, width):
    page = pages / f"{name}.html"
    opened(browser, page, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    hidden = "[...document.querySelectorAll('details')].forEach(each => each.open = true);"
    sizes = "[...document.querySelectorAll(arguments[0])].map(e => e.getBoundingClientRect()).map(r => [r.width, r.height])"
    for tag, least in (("table", 3), ("svg", 2), ("img", 0)):
        found = browser.execute_script(f"{hidden} return {sizes}", tag)
        assert len(found) == counted(page)[tag] >= least
        assert all(wide > 50 and high > 20 for wide, high in found), (tag, found)
    assert browser.execute_script("return [...document.images].every(each => each.naturalWidth > 0)")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


_SEEN = r"""
const number = text => text.match(/[\d.]+/g).map(Number);
const solid = e => { const c = number(getComputedStyle(e).backgroundColor); return c.length < 4 || c[3] > .5 ? c : null; };
const behind = e => e ? solid(e) || behind(e.parentElement) : null;
const text = e => [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim());
const colour = e => number(e.ownerSVGElement ? getComputedStyle(e).fill : getComputedStyle(e).color);
const all = [...document.body.querySelectorAll('*')].filter(text).filter(e => e.checkVisibility());
return all.map(e => [e.tagName, colour(e), behind(e)]);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_text_is_readable(browser, pages, name, scheme):
    """WCAG AA, of every text on the page and in its pictures, against what is behind it."""
    opened(browser, pages / f"{name}.html", scheme=scheme)
    seen = browser.execute_script(_SEEN)
    assert {"P", "TD", "text"} <= {tag for tag, _, _ in seen}
    for tag, colour, page in seen:
        assert contrast(colour[:3], page[:3]) >= 4.5, (tag, colour, page)
    dark = sum(seen[0][2][:3]) < 128
    assert dark == (scheme == "dark")
