"""Class-incremental images: files that are read and refused, equal replay, the mapping onto the buffer, the results."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from rllib_srl.cli import report
from rllib_srl.contrib.images import main as images
from rllib_srl.contrib.images.data import ImageSet, digits, load
from rllib_srl.contrib.images.memory import Recent, Reservoir, Scheduled
from rllib_srl.contrib.images.model import Classifier, Recalled, _view
from rllib_srl.contrib.images.study import ITEMS, LABELLED, REPLAYING, study_of
from rllib_srl.studies.results import read_results, read_trial


def pixels(num, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num, *shape)).astype(np.uint8)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Return the directory of a short study, two seeds an arm."""
    directory = tmp_path_factory.mktemp("images") / "short"
    assert images.main(["--short", "--out", str(directory), "--debug"]) == 0
    return directory


# --- data --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_digits_are_split_by_class_and_stages_teach_two_each():
    found = digits()
    assert (len(found.train_label_N), len(found.test_label_N)) == (1198, 599)  # 1,797 images, a third held out
    shares = np.bincount(found.test_label_N) / np.bincount(np.concatenate([found.train_label_N, found.test_label_N]))
    assert np.abs(shares - 1 / 3).max() < 0.01
    assert [stage.tolist() for stage in found.stages()] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert found.train_NCHW.max() == 255  # 16 of 16


@pytest.mark.slow
def test_the_binary_version_of_cifar_is_read_by_its_fine_label(tmp_path):
    shown = {part: pixels(6, (3, 32, 32), seed) for seed, part in enumerate(("train", "test"))}
    for part, images_NCHW in shown.items():
        records = [bytes([9, fine]) + image.tobytes() for fine, image in zip([0, 1, 2, 3, 0, 1], images_NCHW)]
        (tmp_path / f"{part}.bin").write_bytes(b"".join(records))
    found = load(str(tmp_path))
    assert found.train_label_N.tolist() == [0, 1, 2, 3, 0, 1]
    assert (found.train_NCHW == shown["train"]).all() and (found.test_NCHW == shown["test"]).all()
    assert [stage.tolist() for stage in found.stages()] == [[0, 1], [2, 3]]


@pytest.mark.slow
def test_png_by_class_and_npz_give_the_same_images(tmp_path):
    from PIL import Image

    shown, label_N = pixels(8, (6, 5)), np.arange(8) % 4
    for part in ("train", "test"):
        for at, (image, label) in enumerate(zip(shown, label_N)):
            (tmp_path / "png" / part / f"c{label}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(tmp_path / "png" / part / f"c{label}" / f"{at}.png")
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "images.npz", x_train=shown, y_train=label_N, x_test=shown, y_test=label_N)
    one, two = load(str(tmp_path / "png")), load(str(tmp_path / "npz"))
    order = np.argsort(label_N, kind="stable")  # folders are read class by class
    assert (one.train_NCHW == two.train_NCHW[order]).all() and one.train_NCHW.shape == (8, 1, 6, 5)
    assert one.train_label_N.tolist() == label_N[order].tolist() == two.test_label_N[order].tolist()


class Bomb:
    """Fails the test if it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["train and meta", "images.pkl", "objects in images.npz"])
def test_pickles_are_never_opened(tmp_path, form, capsys):
    if form == "objects in images.npz":
        array = np.empty(1, object)
        array[0] = Bomb()
        np.savez(tmp_path / "images.npz", x_train=array, y_train=array, x_test=array, y_test=array)
    else:
        for name in form.split(" and "):
            (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    assert images.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "unpickling can run any code in the file" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data", "mnist"], "data = 'mnist'; expected 'digits' or a folder with train.bin"),
        (["--seeds", "1"], "seeds = 1; expected at least 2"),
        (["--seeds", "-3"], "seeds = -3; expected at least 2"),
    ],
)
def test_a_bad_command_is_one_clear_error(argv, said, tmp_path, capsys):
    assert images.main([*argv, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_wrong_sizes_are_named(tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(3074 * 4 + 1))
    (tmp_path / "test.bin").write_bytes(bytes(3074))
    with pytest.raises(ValueError, match=r"train.bin has 12297 bytes; expected records of 3074 bytes"):
        load(str(tmp_path))
    good = ImageSet("x", pixels(4, (1, 8, 8)), np.arange(4), pixels(4, (1, 8, 8)), np.arange(4))
    bad = ImageSet("x", pixels(4, (2, 8, 8)), np.arange(4), pixels(3, (1, 8, 2)), np.array([0, 1, 3]))
    assert good.checked() is good
    with pytest.raises(ValueError) as error:
        bad.checked()
    for words in ("train images are uint8", "(8, 2) pixels; expected sides from 4", "classes are train [0, 1, 2, 3]"):
        assert words in str(error.value)
    other = ImageSet("x", pixels(4, (1, 8, 8)), np.arange(4), pixels(4, (1, 9, 8)), np.arange(4))
    with pytest.raises(ValueError, match="expected one size"):
        other.checked()


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_a_broken_archive_is_one_clear_error(tmp_path, content):
    (tmp_path / "images.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"images.npz: .*; expected x_train, y_train, x_test, y_test"):
        load(str(tmp_path))


@pytest.mark.slow
def test_a_folder_with_nothing_in_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected a folder with train.bin and test.bin"):
        load(str(tmp_path))


# --- memories ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reservoir_is_a_uniform_sample():
    # 600 reservoirs of 5 out of 20: each image is in one with probability 1/4, standard deviation about .018.
    held = Counter()
    for seed in range(600):
        memory = Reservoir(5, seed)
        for start in range(0, 20, 4):
            memory.see(np.arange(start, start + 4), np.empty(0, np.int64), 1)
        held.update(memory.stored().tolist())
    shares = np.array([held[index] for index in range(20)]) / 600
    assert np.abs(shares - 0.25).max() < 0.08 and shares.sum() == pytest.approx(5)


@pytest.mark.slow
def test_reservoir_and_schedule_hold_the_same_images():
    held = []
    for seed in (1, 2):
        plain, memory = Reservoir(6, seed), scheduled(bool, seed=seed, num=40)
        for now in range(1, 6):
            for one in (plain, memory):
                one.see(np.arange(8 * now - 8, 8 * now), one.draw(3, now), now)
            assert set(plain.stored()) == set(memory.stored()) and len(plain.stored()) == 6
        held.append(set(plain.stored()))
        memory.close()
    assert held[0] != held[1]


@pytest.mark.slow
def test_recent_holds_the_newest():
    memory = Recent(3, 0)
    for start in (0, 2, 4):
        memory.see(np.arange(start, start + 2), np.empty(0, np.int64), 1)
    assert memory.stored().tolist() == [3, 4, 5] and sorted(memory.draw(9, 2).tolist()) == [3, 4, 5]


def scheduled(is_right, seed=0, num=6, **settings):
    """Return a memory of six of `num` images of class 3, all views of which are recognised or not by `is_right`."""

    def look(indices):
        right_P = np.array([is_right(int(index)) for index in indices])
        predicted_PG = np.repeat(np.where(right_P, 3, 0)[:, None], 4, axis=1)
        features = np.eye(num)[indices][:, None].repeat(4, axis=1).astype(np.float32)
        return Recalled(predicted_PG, np.full(predicted_PG.shape, -0.1, np.float32), features)

    values = {**LABELLED, "load_control": "none", "diversity_coeff": 0.0, **settings}
    return Scheduled(6, seed, look, np.full(num, 3), [f"s{label}" for label in range(4)], **values)


@pytest.mark.slow
def test_an_image_that_is_forgotten_comes_back_first():
    memory = scheduled(lambda index: index > 0, selection_config={"temperature": 0.0, "learnability_coeff": 0.0})
    none = np.empty(0, np.int64)
    memory.see(np.arange(6), none, 1)
    # FSRS, first review: Again is due after .212 days, 4 of 4 right (Easy) after 8.3. Image 0 alone is due at 2.
    assert memory.draw(1, 2).tolist() == [0]
    drawn = memory.draw(6, 2)
    assert sorted(drawn.tolist()) == list(range(6)) and drawn[0] == 0
    memory.see(none, drawn, 2)
    assert memory.measures(2)["observed_recall_mean"] == pytest.approx(5 / 6)
    memory._buffer.check_valid()
    memory.close()


@pytest.mark.slow
def test_an_image_is_an_item_with_its_stage_label_and_features():
    memory = scheduled(lambda index: index % 2 == 0)
    memory.see(np.arange(4), np.empty(0, np.int64), 1)
    store = memory._buffer.store
    rows = {store.prompt_of(int(slot)).prompt_id: store.items[int(slot)] for slot in store.slots()}
    assert {name: float(row["pass_rate"]) for name, row in rows.items()} == {"0": 1, "1": 0, "2": 1, "3": 0}
    assert all(row["has_vector"] for row in rows.values())
    assert {store.prompt_of(int(slot)).domain for slot in store.slots()} == {"s3"}
    memory.close()


@pytest.mark.slow
def test_an_image_that_the_buffer_refuses_is_an_error():
    memory = scheduled(bool, max_episode_tokens=1)
    with pytest.raises(ValueError, match=r"step 1: 3 new images were refused: too_long"):
        memory.see(np.arange(3), np.empty(0, np.int64), 1)
    memory.close()


# --- classifier --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_view_is_the_image_moved_by_a_pixel():
    image = np.zeros((1, 1, 8, 8), np.uint8)
    image[0, 0, 3, 4] = 255
    seen = set()
    for seed in range(60):
        view = _view(image, torch.Generator().manual_seed(seed))[0, 0]
        seen.add(tuple(int(x) for x in np.unravel_index(int(view.argmax()), (8, 8))))
    assert seen == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}  # an eighth of 8 is one pixel


@pytest.mark.slow
def test_looking_changes_nothing_that_training_uses():
    images_NCHW, label_N = pixels(12, (1, 8, 8)), np.arange(12) % 4
    plain, looked = (Classifier((1, 8, 8), 4, 16, 0.1, seed=3) for _ in range(2))
    before = torch.random.get_rng_state()
    for _ in range(3):
        looked.recall(images_NCHW, 4)
        assert plain.train(images_NCHW, label_N) == looked.train(images_NCHW, label_N)
    assert (plain.predict(images_NCHW) == looked.predict(images_NCHW)).all()
    assert (torch.random.get_rng_state() == before).all()


@pytest.mark.slow
def test_recall_counts_views_of_each_image():
    model = Classifier((3, 20, 20), 4, 16, 0.1, seed=3)  # above 16 pixels: convolutions
    found = model.recall(pixels(5, (3, 20, 20)), 2)
    assert found.predicted_PG.shape == (5, 2) and found.features_PGD.shape == (5, 2, 16)
    assert (found.logp_PG <= 0).all() and (found.logp_PG >= -np.log(4) - 1e-5).all()  # the most likely of 4 classes


# --- the study ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_arm_with_replay_replays_and_stores_equally(short):
    results = read_results(short)
    assert len(results.trials) == 12 and all(trial.is_finished for trial in results.trials)
    at_end = {(t.header.arm, t.header.seed): t.rows[-len(results.study.domains) :] for t in results.trials}
    # 120 images, 24 a stage: steps of 10, 10 and 4, two updates each, of which the very first replays nothing.
    # So 2 x 120 new ones are trained on and 29 x 10 stored ones, of 50.
    for (arm, _), rows in at_end.items():
        assert rows[0].num_generated_tokens == 120 == results.study.budget
        assert rows[0].num_trained_tokens == (530 if arm in REPLAYING else 240)
        if arm in REPLAYING:
            assert sum(row.measures["num_replayed"] for row in rows) == 290
            assert sum(row.measures["num_stored"] for row in rows) == 50
        assert ("median_reviews" in rows[0].measures) == (arm in ("srl", "spacing", "srl_defaults"))
    assert {arm.name: dict(arm.settings) for arm in results.study.arms}["srl_defaults"] == ITEMS


@pytest.mark.slow
def test_paired_arms_start_alike(short):
    before = {}
    for trial in read_results(short).trials:
        rows = [row.accuracy for row in trial.rows if row.stage == -1]
        assert before.setdefault(trial.header.seed, rows) == rows and len(rows) == 5


@pytest.mark.slow
def test_a_finished_study_is_not_run_again_and_another_is_refused(short, capsys, monkeypatch):
    monkeypatch.setattr(images.Run, "into", lambda *_: pytest.fail("ran again"))
    assert images.main(["--short", "--out", str(short)]) == 0
    said = capsys.readouterr().out
    assert "undecided" in said and "final accuracy, SRL + diversity minus reservoir replay" in said
    assert images.main(["--short", "--seeds", "3", "--out", str(short)]) == 1
    assert "holds another study" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trial_that_was_cut_off_comes_out_the_same(short):
    path = short / "trials" / "srl--2.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:9]))
    assert images.main(["--short", "--out", str(short), "--debug"]) == 0
    study = read_results(short).study
    again = [(row.stage, row.domain, row.accuracy, row.measures) for row in read_trial(path, study).rows]
    path.write_text(whole)
    assert again == [(row.stage, row.domain, row.accuracy, row.measures) for row in read_trial(path, study).rows]


@pytest.mark.slow
def test_unequal_replay_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Reservoir, "draw", lambda self, num, now: self.stored()[: num - 1])
    study, setup = study_of(digits().first_of_each_class(4), 2, is_short=True)
    arm = next(arm for arm in study.arms if arm.name == "reservoir")
    one = images.Run(digits().first_of_each_class(4), setup, arm, 1)
    with pytest.raises(ValueError, match=r"update 2: 9 images were replayed; expected 10 distinct"):
        one._step(np.arange(10))


@pytest.mark.slow
def test_the_report_says_what_was_trained(short, tmp_path):
    assert report.main([str(short), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "A small image classifier was trained on 5 kinds of task" in text and "SRL + diversity" in text
