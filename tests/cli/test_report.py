"""`slidedp report`: one page with everything in it, of finished, cut and foreign folders."""

import html.parser
import json
import shutil

import pytest
from runs import metrics

from slidedp_jax.cli import main as slidedp
from slidedp_jax.run.report_charts import ticks
from slidedp_jax.run.report_data import MOST_POINTS, curve, shares

SECTIONS = [
    "Loss",
    "Learning rate",
    "Gradient norm",
    "Tokens per second",
    "Memory",
    "What the step's thread waited for",
    "What was busy beside it",
    "Predicted and measured",
    "Settings other than by default",
]


class Page(html.parser.HTMLParser):
    """Checks that tags close in order, and keeps headings, curves and what would be fetched."""

    VOID = ("meta", "line", "path", "circle", "i")

    def __init__(self, text):
        super().__init__()
        self.open, self.headings, self.curves, self.cells, self.fetched = [], [], [], [], []
        self.names, self.labels = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.fetched += [v for k, v in attrs.items() if k in ("src", "href", "data")]
        if tag in ("script", "link", "iframe", "img"):
            self.fetched.append(tag)
        if tag == "path" and "curve" in attrs.get("class", ""):
            self.curves.append(attrs["d"])
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "span":
            self.names.append(data)
        if self.open and self.open[-1] == "text":
            self.labels.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if self.open[-2:] == ["td", "div"]:
            self.cells.append(data)


def report(folder, *words):
    assert slidedp(["report", str(folder), *words]) == 0
    text = (folder / "report.html").read_text()
    assert "url(" not in text and "@import" not in text and "http" not in text
    return Page(text)


@pytest.fixture
def copied(straight, tmp_path):
    folder = tmp_path / "run <b>"
    shutil.copytree(straight, folder, ignore=shutil.ignore_patterns("checkpoints", "export"))
    return folder


def test_a_page_has_every_figure_and_needs_nothing_else(copied):
    page = report(copied)
    assert [own for own in SECTIONS if own not in page.headings] == []
    assert page.fetched == []
    steps = len(metrics(copied))
    assert steps == 12 and page.curves[0].count("L") == steps - 1
    assert "learning_rate" in page.cells and "0.01" in page.cells
    first = metrics(copied)[0]
    assert first["loss"] > 0


def test_a_run_that_is_cut_or_skipped_steps_is_drawn(copied):
    """A line cut short, a loss that is null, one step only; samples and evaluations in between."""
    path = copied / "metrics.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines()[:2])
    second |= {"loss": None, "spikes": ["loss"], "nonfinite": {"loss": "nan"}}
    records = [
        {"step": 0, "eval_loss": 5.0},
        first,
        second,
        {"step": 2, "eval_loss": 4.0},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 3, "lo')
    sample = {"step": 1, "prompt": "<p>", "completion": "a & b"}
    (copied / "samples.jsonl").write_text(json.dumps(sample) + "\n" + '{"step": 3, "pro')
    page = report(copied)
    assert "Samples" in page.headings and "a & b" in page.cells and "<p>" in page.cells
    path.write_text(json.dumps(first) + "\n")
    report(copied, "--out", str(copied / "report.html"))


def test_what_is_seen_is_called_what_it_is(copied):
    """One held-out set is one curve; shares are of the time between steps; blank samples show."""
    path = copied / "metrics.jsonl"
    steps = path.read_text()
    one = {"step": 0, "eval_loss": 5.0, "eval_chats_loss": 5.0, "eval_chats_perplexity": 148.4}
    samples = [{"step": 0, "prompt": "p", "completion": text} for text in ("\n\n", "\nab\n\n")]
    (copied / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    path.write_text(json.dumps(one) + "\n" + steps)
    page = report(copied)
    assert [name for name in page.names if "held out" in name] == ["held out: chats"]
    assert (
        page.labels.count("% of the time") == 2 and '"\\n\\n"' in page.cells and "ab" in page.cells
    )
    path.write_text(json.dumps(one | {"eval_code_loss": 4.0}) + "\n" + steps)
    found = [name for name in report(copied).names if "held out" in name]
    assert found == ["held out", "held out: chats", "held out: code"]
    earlier = {"step": 0, "eval_loss": 5.5}  # before the set was named, or of more than that
    path.write_text("\n".join(map(json.dumps, (earlier, one))) + "\n" + steps)
    found = [name for name in report(copied).names if "held out" in name]
    assert found == ["held out", "held out: chats"]
    path.write_text(json.dumps({"step": 0, "eval_loss": 5.0}) + "\n" + steps)
    assert [name for name in report(copied).names if "held out" in name] == ["held out"]


def test_folders_that_are_no_runs_are_refused(copied, tmp_path, capsys):
    assert slidedp(["report", str(tmp_path / "none")]) == 1
    assert "holds no run.json" in capsys.readouterr().err
    (copied / "metrics.jsonl").write_text("")
    assert slidedp(["report", str(copied)]) == 1
    assert "has not taken a step yet" in capsys.readouterr().err
    (copied / "run.json").write_text("{")
    assert slidedp(["report", str(copied)]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_long_runs_are_drawn_with_as_many_points_as_fit():
    records = [
        {"step": n, "loss": float(n % 7), "step_time_s": 2.0, "wait_update_s": 1.0 if n % 2 else 0}
        for n in range(1, 100_001)
    ]
    bins = curve(records, "loss")
    assert MOST_POINTS / 2 < len(bins) <= MOST_POINTS
    assert bins[-1].step == 100_000 and (bins[0].low, bins[0].high) == (0.0, 6.0)
    assert bins[0].mean == pytest.approx(3.0, abs=0.05)
    assert shares(records, "wait_update_s")[0].mean == pytest.approx(0.25, abs=0.01)
    assert curve([], "loss") == []


def test_shares_count_the_time_between_steps():
    """An evaluation of 6 s before step 2, in which the update went on; then another start."""
    elapsed = [(2.0, 1.0), (10.0, 6.0), (12.0, 1.0), (2.0, 0.5), (None, 1.0)]
    records = [
        {"step": n, "step_time_s": 2.0, "elapsed_s": at, "host_update_s": busy}
        for n, (at, busy) in enumerate(elapsed, start=1)
    ]
    found = [bin.mean for bin in shares(records, "host_update_s")]
    assert found == pytest.approx([0.5, 0.75, 0.5, 0.25, 0.5])
    nothing = [{"step": 1, "step_time_s": 0.0, "host_update_s": 0.0}]
    assert shares(nothing, "host_update_s")[0].mean == 0.0
    assert shares([], "host_update_s") == []


def test_ticks_are_round():
    assert ticks(0.0, 1.0, 5) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(7.03, 7.71, 5) == pytest.approx([7.2, 7.4, 7.6])
    assert ticks(3.0, 3.0, 5) == [3.0]
