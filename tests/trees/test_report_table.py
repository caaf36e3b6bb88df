"""The table of a report: the share of each weight in the loss, text and HTML."""

import html.parser

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import relative


@pytest.fixture(scope="module")
def calibrated():
    model = eqx.nn.MLP(64, 32, 64, 1, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (128, 64))
    stats = eqquant.calibrate(lambda model, x: jax.vmap(model)(x), model, [x])
    quantized = eqquant.quantize_tree(model, "nf4")
    return model, quantized, x, stats


def test_loss_of_a_linear_layer_is_its_squared_change(calibrated):
    """Gradients of its results have magnitude 1, so that the estimate is exact."""
    x = calibrated[2]
    layer = eqx.nn.Linear(64, 32, key=jax.random.key(2))
    stats = eqquant.calibrate(lambda layer, x: jax.vmap(layer)(x), layer, [x])
    quantized = eqquant.quantize_tree(layer, "nf4")
    report = eqquant.report(quantized, layer, calibration=stats)
    change = jnp.sum((jax.vmap(quantized)(x) - jax.vmap(layer)(x)) ** 2)
    assert relative(report.loss, change) < 1e-3
    assert report.rows[0].loss == report.loss and report.rows[1].loss is None


def test_shares_sum_to_the_whole(calibrated):
    model, quantized, _, stats = calibrated
    report = eqquant.report(quantized, model, calibration=stats)
    text = str(report)
    assert "share of loss" in text
    shares = [float(word[:-1]) for word in text.split() if word.endswith("%")]
    assert len(shares) == 2 and abs(sum(shares) - 100) < 0.2
    assert "share of loss" not in str(eqquant.report(quantized, model))


class Cells(html.parser.HTMLParser):
    """Collects the text of the cells of each row."""

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows:
            self.rows[-1][-1] += data


def test_html_has_the_cells_of_the_text(calibrated):
    model, quantized, x, stats = calibrated
    fn = lambda model, x: jax.vmap(model)(x)
    report = eqquant.report(quantized, model, calibration=stats, fn=fn, batches=[x])
    shown = report._repr_html_()
    rows = Cells(shown).rows
    assert len(rows) == 1 + len(report.rows) + 1
    assert len(set(map(len, rows))) == 1
    lines = [line for line in str(report).splitlines() if not line.startswith("---")]
    cells = [" ".join(row).split() for row in rows]
    # The text merges similar rows, and has another order.
    for line in (line for line in lines[:-1] if "arrays)" not in line):
        assert line.split() in cells
    assert lines[-1] in shown


def test_html_escapes_paths():
    tree = {"<b>": eqquant.quantize(jnp.ones((4, 64)), "nf4")}
    assert "<b>" not in eqquant.report(tree)._repr_html_()


def test_similar_rows_are_merged_and_large_rows_are_first():
    mlp = eqx.nn.MLP(64, 64, 64, 3, key=jax.random.key(0))
    kernel = jnp.ones((64, 40))
    model = {"mlp": mlp, "dense": {"kernel": kernel, "bias": jnp.ones(40)}}
    quantized = eqquant.quantize_tree(model, rules={"mlp.layers.3.*": "int8"})
    report = eqquant.report(quantized, model)
    lines = [line.split() for line in str(report).splitlines()]
    weights, last, dense, biases = lines[2:6]
    assert weights[:6] == ["mlp.layers.*.weight", "(3", "arrays)", "64x64", "1", "nf4"]
    assert last[:4] == ["mlp.layers.3.weight", "64x64", "1", "int8"]
    # The last axis of this kernel is its output.
    assert dense[:4] == ["dense.kernel", "64x40", "0", "nf4"]
    assert biases[:4] == ["others", "(5", "arrays)", "296"]
    rows = [row for row in report.rows if row.path.startswith("mlp.layers")]
    smallest = min(row.sqnr for row in rows if row.format == eqquant.NF4())
    assert f"{smallest:.2f}" in weights
    assert len(report.rows) == 10 and report._repr_html_().count("<tr>") == 12
