"""The report's page in a real browser, at a phone's and a desktop's width, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from transformers import Gemma2Config

import regraft

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PHONE, DESKTOP = (390, 844), (1280, 900)

pytestmark = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver"
    ),
    pytest.mark.xdist_group("browser"),
]


def report() -> regraft.RewriteReport:
    """Sliding and full layers in turn; the last one replayed, its reason with a script in it."""
    config = Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, sliding_window=16,
    )  # fmt: skip
    found = regraft.inspect(config)
    changes = {"served": "replayed", "reason": "</script><script>document.title='broken'</script>"}
    last = found.layers[-1]
    found.layers[-1] = type(last)(**{**vars(last), **changes})
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    page = tmp_path_factory.mktemp("page") / "report.html"
    report().to_html(page)
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER))) as driver:
        driver.execute_cdp_cmd("Network.enable", {})
        driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
        )
        driver.get(page.as_uri())
        yield driver


@pytest.fixture(params=[PHONE, DESKTOP], ids=["phone", "desktop"])
def page(browser: webdriver.Chrome, request: pytest.FixtureRequest) -> webdriver.Chrome:
    width, height = request.param
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 760},
    )
    browser.refresh()
    return browser


def blocks(page: webdriver.Chrome) -> list[WebElement]:
    return [b for b in page.find_elements(By.CSS_SELECTOR, "#layers button") if b.is_displayed()]


def detail(page: webdriver.Chrome) -> WebElement:
    return page.find_element(By.ID, "detail")


def test_it_fits_the_screen_and_loads_nothing(page: webdriver.Chrome) -> None:
    wide = page.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0
    loaded = page.execute_script("return performance.getEntriesByType('resource').length")
    assert loaded == 0
    assert page.title == "Regraft: Gemma2ForCausalLM"
    assert page.get_log("browser") == []


def test_a_block_for_each_layer_coloured_by_how_it_is_served(page: webdriver.Chrome) -> None:
    found = blocks(page)
    assert len(found) == 6
    styles = {block.value_of_css_property("border-top-style") for block in found[:-1]}
    assert styles == {"solid"}
    assert found[-1].value_of_css_property("border-top-style") == "dashed"


def test_a_click_shows_the_layer(page: webdriver.Chrome) -> None:
    """Its path, its caches to scale, its mask as a picture, its graph before and after; in sight, on a phone too."""
    block = blocks(page)[2]
    block.click()
    assert block.get_attribute("aria-pressed") == "true"
    top, shown = page.execute_script(
        "const d = document.getElementById('detail').getBoundingClientRect(); return [d.top, window.innerHeight]"
    )
    assert -1 <= top < shown / 2
    text = detail(page).text
    assert "model.layers.2.self_attn" in text
    assert "bytes per token" in text
    assert "paged_attention" in text
    graphs = detail(page).find_elements(By.TAG_NAME, "pre")
    assert len(graphs) == 2
    assert "softmax" in graphs[0].text
    bars = detail(page).find_elements(By.CSS_SELECTOR, ".bar")
    assert len({bar.size["width"] for bar in bars}) == 1 < len(bars)


def squares(page: webdriver.Chrome) -> int:
    return len(detail(page).find_elements(By.TAG_NAME, "rect"))


def test_a_window_is_drawn(page: webdriver.Chrome) -> None:
    counts = []
    for block in blocks(page)[:2]:
        block.click()
        counts.append(squares(page))
    sliding, full = counts
    assert full == 40 * 41 // 2
    assert 0 < sliding < full


def test_search(page: webdriver.Chrome) -> None:
    box = page.find_element(By.ID, "search")
    box.send_keys("replayed")
    (last,) = blocks(page)
    assert "model.layers.5" in last.text
    box.clear()
    box.send_keys("layers.1 grafted")
    assert ["model.layers.1" in block.text for block in blocks(page)] == [True]


def test_a_reason_is_text_and_never_a_script(page: webdriver.Chrome) -> None:
    blocks(page)[-1].click()
    assert "document.title='broken'" in detail(page).text
    assert page.title == "Regraft: Gemma2ForCausalLM"


def test_keyboard(page: webdriver.Chrome) -> None:
    """Every block is reached and opened without a pointer."""
    page.execute_script("document.querySelector('#layers button').focus()")
    page.switch_to.active_element.send_keys("\ue007")
    assert "model.layers.0.self_attn" in detail(page).text


def test_pictures_for_people(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """A screenshot is no blank page."""
    assert browser.save_screenshot(str(tmp_path / "page.png"))
    assert (tmp_path / "page.png").stat().st_size > 10_000
