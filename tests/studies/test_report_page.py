"""The report: it stands alone, says what the numbers say, and refuses what it cannot read."""

import base64
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from rllib_srl.cli import report
from rllib_srl.studies.report import study_page
from rllib_srl.studies.report.charts import line_of
from rllib_srl.studies.report.page import Chart
from rllib_srl.studies.report.study_page import number, span
from tests.studies.synthetic import small_study, write_synthetic


@pytest.fixture(scope="module")
def page(written, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    assert report.main([str(written), "--out", str(out)]) == 0
    assert not list(written.glob("report.*"))
    return (out / report.NAME).read_text()


@pytest.mark.slow
def test_the_page_is_whole_and_needs_nothing_else(page):
    links = re.findall(r'\s(?:src|href|srcset|data)="([^"]*)"', page)
    assert len(links) == 1 + 5  # all domains, and each
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)
    for link in links:
        assert ElementTree.fromstring(base64.b64decode(link.partition(",")[2])).tag.endswith("svg")
    assert not re.search("<(script|link|iframe|object)|url\\(|@import", page)
    assert all(re.search('alt="[^"]+"', image) for image in re.findall("<img[^>]*>", page))
    for tag in set(re.findall(r"</(\w+)>", page)):
        assert len(re.findall(rf"<{tag}[\s>]", page)) == page.count(f"</{tag}>"), tag


def test_the_page_has_answer_table_and_settings(page):
    assert "Does replay by spaced repetition" in page
    assert "Yes. SRL + diversity is better in final accuracy and retention" in page
    for words in ("no replay", "generated tokens", "trained tokens", "seconds", "peak memory", "group_size"):
        assert words in page
    assert "10 of 10 runs" in page and "Holm" in page
    assert "finished runs" in page and "nan" not in re.sub('base64,[^"]*', "", page)
    assert re.search(r"SRL \+ diversity</th><td>82\.\d% \(8", page)


def test_settings_are_shown_without_secrets():
    env_config = {"api_key": "abc", "reward_url": "https://me:hunter2@host/grade", "num_shots": 0}
    study = small_study(settings={"env_config": env_config, "group_size": 8})
    arms = tuple(replace(arm, settings={"regularisers": {"token": "abc"}}) for arm in study.arms)
    for one in (study, replace(study, arms=arms)):
        shown = str(list(study_page._settings(one)))
        assert "abc" not in shown and "hunter" not in shown
        assert "'api_key': '[secret]', 'reward_url': 'https://[password]@host/grade', 'num_shots': 0" in shown


@pytest.mark.slow
def test_a_short_and_cut_off_study_is_reported_as_such(tmp_path, quick, capsys):
    study = small_study(seeds=(1, 2), arms=("srl", "no_replay"))
    write_synthetic(tmp_path, study, skip=[("no_replay", 2)])
    assert report.main([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "Undecided" in text and "1 of 2 trials are not finished" in text and "cut off" in text
    assert "undecided: too few runs" in text
    assert "Undecided" in capsys.readouterr().out
    none = write_synthetic(tmp_path / "none", study, skip=[(arm.name, n) for arm in study.arms for n in (1, 2)])
    assert report.main([str(none)]) == 0  # no trial is finished


def test_curves_of_seeds_are_averaged_at_equal_cost():
    x = np.array([0.0, 1.0, 2.0])
    line = line_of([x, x], [np.array([0, 0.2, 0.4]), np.array([0.2, 0.4, 0.8])])
    assert line.mean == pytest.approx([0.1, 0.3, 0.6]) and line.high[2] == pytest.approx(0.8)
    apart = line_of([x, 2 * x], [x, 2 * x])  # the same line, measured at other costs, over what both cover
    assert apart.x[-1] == 2 and apart.mean == pytest.approx(apart.x)


def test_numbers_as_a_reader_sees_them():
    assert number(0.825, "share") == "82.5%" and number(-0.0663, "points") == "−6.6 points"
    assert number(0.1, "share", signed=True) == "+10.0 points" and number(float("nan"), "share") == "–"
    assert number(1234567, "tokens") == "1,234,567" and number(7200, "seconds") == "2.00 h"
    assert number(2.1e9, "bytes") == "2.10 GB"
    assert span(0.811, 0.837, "share") == "81.1 to 83.7" and span(float("nan"), 0.5, "share") == "no interval"
    assert Chart(b"<svg/>", "").source == "data:image/svg+xml;base64,PHN2Zy8+"
