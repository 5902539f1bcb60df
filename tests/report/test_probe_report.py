"""The page of a comparison on a probe: accuracies beside the losses, and what could be known beside both."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tensorformer.lab.results import Comparison, Probe, SeedResult
from tensorformer.report import quantities as q
from tensorformer.report import table, words, write_report
from tests.report.report_factory import CONTEXT, UNSAFE, estimate, make_comparison, noise
from tests.report.test_report import PNGS, Reader, bare, markdown_text, png_size


def on_probe(made: Comparison, **changes: object) -> Comparison:
    """Return the comparison as if it were one on a probe."""
    lengths = list(made.variants[0].context_losses)
    probe = Probe(
        "multi-query associative recall", "8 pairs of 32 keys", 65, dict.fromkeys(lengths, 8_192), 1 / 32,
        dict.fromkeys(lengths, 1.0),
    )  # fmt: skip
    variants = []
    for i, v in enumerate(made.variants):
        seeds = [_with_accuracy(s, i) for s in v.seeds]
        accuracies = {n: estimate([s.context_accuracies[n] for s in seeds]) for n in lengths}
        variants.append(msgspec.structs.replace(v, seeds=seeds, bits_per_byte=None, context_accuracies=accuracies))
    probe = msgspec.structs.replace(probe, **changes)
    return msgspec.structs.replace(made, variants=variants, corpus=None, probe=probe)


def _with_accuracy(s: SeedResult, i: int) -> SeedResult:
    end = 0.98 - 0.2 * i + 0.01 * noise(i, s.seed)
    curve = [msgspec.structs.replace(p, accuracy=max(0.03, end * p.step / 800)) for p in s.curve]
    accuracies = {n: end - 0.05 * k for k, n in enumerate(s.context_losses)}
    return msgspec.structs.replace(s, bits_per_byte=None, curve=curve, context_accuracies=accuracies)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return on_probe(make_comparison())


def test_both_files_hold_every_accuracy(comparison: Comparison, tmp_path: Path) -> None:
    page = write_report(comparison, tmp_path)
    reader, text = Reader(page), markdown_text(page.with_suffix(".md"))
    expected = [
        words.answer(comparison),
        "chance 3.1 %",
        "a perfect learner gives 100.0 %, a guess 3.1 %",
        "8,192 answers; a perfect learner gets 100.0 %",
    ]
    for v in comparison.variants:
        expected += q.share_parts(v.context_accuracies[CONTEXT])
        expected += [q.share(s.context_accuracies[CONTEXT]) for s in v.seeds]
    for wanted in expected:
        wanted = " ".join(wanted.split())
        assert wanted in reader.words, wanted
        assert wanted in text, wanted
    for file in (reader.words, text):
        assert "Bits per byte" not in file
        assert "nats per token" not in file
        assert "nats per answer" in file
        assert "multi-query associative recall" in file
    assert {p.stem for p in tmp_path.glob("*.png")} == PNGS | {"accuracy", "accuracy_context"}
    assert all(png_size(tmp_path / f"{name}.png")[0] >= 1200 for name in ("accuracy", "accuracy_context", "summary"))


def test_the_answer_says_how_many_are_right(comparison: Comparison) -> None:
    said = words.answer(comparison).replace(q.THIN, " ")
    accuracy = q.share(comparison.variants[0].context_accuracies[CONTEXT].mean).replace(q.THIN, " ")
    assert f"Right answers: swiglu {accuracy}, bilinear " in said
    assert said.endswith("; a perfect learner gives 100.0 %, a guess 3.1 %.")
    assert "Right answers" not in words.answer(make_comparison())
    alone = on_probe(make_comparison({"softmax": ""}, seeds=1))
    assert "There is nothing to compare it with. Right answers: softmax" in words.answer(alone)


def test_the_table_keeps_its_width(comparison: Comparison) -> None:
    titles = [column.title for column in table.columns(comparison)]
    assert titles[:4] == ["Parameters", "Compute", "Final loss", "Accuracy"]
    assert len(titles) == len(table.columns(make_comparison()))
    assert all(len(line.cells) == len(titles) for line in table.lines(comparison))


def test_a_report_on_text_leaves_no_pictures_of_an_earlier_one_on_a_probe(tmp_path: Path) -> None:
    (tmp_path / "accuracy.png").write_bytes(b"of an earlier report")
    write_report(bare({"a": "", "b": ""}, seeds=1), tmp_path)
    assert {p.stem for p in tmp_path.glob("*.png")} == PNGS - {"context", "data_to_match"}


def test_no_word_of_a_probe_is_markup(tmp_path: Path) -> None:
    made = on_probe(make_comparison({"a": "", "b": ""}, seeds=2), name=UNSAFE, description=UNSAFE)
    page = write_report(made, tmp_path)
    reader = Reader(page)
    assert page.read_text(encoding="utf-8").count("<script") == 3
    assert not [tag for tag, at in reader.tags if tag == "img" or any(name.startswith("on") for name in at)]
    assert reader.words.count(" ".join(UNSAFE.split())) >= 2
