"""The memory/time curves: what is run, what ends a curve, going on after an interruption, fits, pictures, compare."""

import json

import pytest

from benchmarks import compare, machine
from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling import fit, methods, plot, runner
from benchmarks.scaling.methods import Curve

SMALL = ["--methods", "lrd", "torch", "diagonal", "--ranks", "8", "--layouts", "row", "--last", "12"]


def record(curve, S, log_prob=-1.0):
    """Of a cost that grows with the parameters."""
    seconds = 1e-6 * curve.parameters(S) * (3.0 if curve.method == "torch" else 1.0)
    timing = {"min": seconds, "median": seconds, "samples": [seconds] * 3, "working_bytes": 8 * curve.parameters(S)}
    memory = {"parameter_bytes": 4096 * curve.parameters(S)}
    return {"status": "ok", **memory, "forward": timing, "forward_backward": timing, "log_prob": log_prob}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command with made-up measurements, without figures unless they are asked for.

    Gives its exit code and what was measured.
    """
    measured = []

    def invented(curve, S, document, options):
        measured.append((curve.name, S))
        return record(curve, S)

    monkeypatch.setattr(runner, "measure", invented)

    def run_it(*options, figures=False):
        measured.clear()
        more = options if figures else (*options, "--no-figures")
        code = scaling.main([*SMALL, "--output", str(tmp_path / "scaling.json"), *more])
        return code, list(measured)

    run_it.path = tmp_path / "scaling.json"
    return run_it


def points(path):
    return [(p["curve"], p["variables"]) for p in json.loads(path.read_text())["points"]]


def test_methods_of_one_size_follow_one_another(run):
    code, measured = run()
    assert code == 0
    assert measured == [(c, S) for S in (256, 1024, 4096) for c in ("diagonal", "lrd 8 row", "torch 8 row")]
    assert points(run.path) == measured


def test_goes_on_where_it_was_interrupted(run, monkeypatch):
    run("--restart")
    whole = json.loads(run.path.read_text())
    invented = runner.measure

    def interrupted(curve, S, document, options):
        if S == 1024 and curve.method == "lrd":
            raise KeyboardInterrupt
        return invented(curve, S, document, options)

    monkeypatch.setattr(runner, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("--restart")
    assert len(points(run.path)) == 4
    monkeypatch.setattr(runner, "measure", invented)
    _, measured = run()
    assert len(measured) == 5
    resumed = json.loads(run.path.read_text())
    for document in (whole, resumed):
        del document["machine"]["date"]
    assert resumed == whole


def test_another_run_is_not_mixed_in(run, capsys):
    run()
    code, measured = run("--seconds", "7")
    assert (code, measured) == (2, [])
    assert "another seconds" in capsys.readouterr().err
    assert run("--seconds", "7", "--restart")[0] == 0


def test_more_may_be_added(run):
    run()
    _, measured = run("--last", "14")
    assert measured == [(c, 16384) for c in ("diagonal", "lrd 8 row", "torch 8 row")]


def end_torch_at(variables, monkeypatch):
    invented = runner.measure

    def measure(curve, S, document, options):
        if (curve.method, S) == ("torch", variables):
            return {"status": "budget", "reason": "enough"}
        return invented(curve, S, document, options)

    monkeypatch.setattr(runner, "measure", measure)


def test_a_curve_ends_with_its_budget(run, monkeypatch):
    end_torch_at(1024, monkeypatch)
    run()
    assert ("torch 8 row", 4096) not in points(run.path)
    assert ("lrd 8 row", 4096) in points(run.path)
    assert run()[1] == []  # an ended curve stays ended


@pytest.mark.parametrize(("option", "reason"), [("memory", "memory"), ("point_seconds", "would take")])
def test_budgets_are_foreseen(option, reason):
    curve = Curve("lrd", 8, "row")
    document = {"points": [{"curve": curve.name, **curve._asdict(), "variables": 1 << 20, **record(curve, 1 << 20)}]}
    options = scaling.arguments(["--memory", "1000", "--point-seconds", "1e6"])
    assert runner.over_budget(curve, 1 << 21, document, options) is None
    setattr(options, option, 1e-3)
    assert reason in runner.over_budget(curve, 1 << 21, document, options)


def test_a_wrong_log_likelihood_is_noticed():
    curve = Curve("lrd", 8, "row")
    document = {"points": [{"curve": curve.name, **curve._asdict(), "variables": 256, **record(curve, 256, -500.0)}]}
    peer = Curve("torch", 8, "row")
    assert runner.disagreement(peer, 256, -500.1, document) is None
    assert "-510" in runner.disagreement(peer, 256, -510.0, document)
    assert runner.disagreement(peer, 256, float("nan"), document)
    assert runner.disagreement(peer, 512, -510.0, document) is None  # other parameters


def test_a_real_point():
    check_point("lrd 8 rank")


@pytest.mark.parametrize("name", ["full triangular", "joint lrd 8 row", "training step lrd 8 rank"])
def test_other_points(name, no_processes):
    check_point(name)
    assert no_processes == ["measure_point"]


def check_point(name):
    curve = Curve.parse(name)
    if reason := methods.unavailable(curve.method):
        pytest.skip(reason)
    options = scaling.arguments(["--seconds", "0.01", "--point-seconds", "600"])
    found = runner.measure(curve, 512, {"points": []}, options)
    assert found["status"] == "ok", found
    for direction in runner.directions(found):
        assert found[direction]["min"] > 0
    assert found["parameter_bytes"] >= 0
    assert found["log_prob"] != 0


def test_a_failing_point_tells_why(no_processes):
    found = runner.measure(Curve("no such method", 8, "row"), 64, {"points": []}, scaling.arguments([]))
    assert found["status"] == "failed"
    assert "no such method" in found["reason"]


@pytest.mark.parametrize("curve", [Curve("lrd", 64, "rank"), Curve("full naive"), Curve("joint torch", 8, "row")])
def test_names_of_curves(curve):
    assert Curve.parse(curve.name) == curve


def test_slopes():
    assert fit.slope([(x, 5.0 * x**2) for x in (1.0, 10.0, 100.0)]) == 2.0
    assert fit.slope([(3.0, 1.0)]) is None
    curve = Curve("lrd", 8, "row")
    own = [
        {"curve": curve.name, **curve._asdict(), "variables": S, **record(curve, S)}
        for S in (1 << 16, 1 << 18, 1 << 20)
    ]
    assert fit.fits({"points": own})["in_variables"][curve.name]["forward"] == {"seconds": 1.0, "bytes": 1.0}


def test_pictures(run, monkeypatch):
    end_torch_at(1024, monkeypatch)  # draws a cross
    run(figures=True)
    names = {"scaling_forward", "scaling_forward_backward", "scaling_ratios"}
    for suffix in (".png", ".svg"):
        for name in names:
            assert run.path.with_name(name + suffix).stat().st_size > 10_000
    assert "Quadro RTX 8000" in run.path.with_name("scaling_forward.svg").read_text()


def test_paper_has_all_curves():
    assert {f"lrd {rank}" for rank in methods.RANKS} | set(methods.WITHOUT_RANK) == set(plot.PAPER["seconds"])
    assert plot.PAPER["seconds"].keys() == plot.PAPER["memory_bytes"].keys()
    assert [len(v) for v in plot.PAPER["seconds"].values()] == [len(v) for v in plot.PAPER["memory_bytes"].values()]


def document_of(path, seconds, working_bytes=1 << 24, spread=1.01):
    timing = {"samples": [seconds, seconds * spread, seconds * spread], "working_bytes": working_bytes}
    point = {"curve": "lrd 8 row", "variables": 256, "status": "ok", "forward": timing}
    machine.write_json(path, {"machine": {"cpu": "a"}, "points": [point]})
    return str(path)


@pytest.mark.parametrize(
    ("seconds", "working_bytes", "spread", "code", "word"),
    [
        (1.05, 1 << 24, 1.01, 0, "0 worse"),
        (1.3, 1 << 24, 1.01, 1, "SLOWER"),
        (1.3, 1 << 24, 1.2, 0, "0 worse"),  # within the noise
        (0.5, 1 << 24, 1.01, 0, "faster"),
        (1.0, 1 << 25, 1.01, 1, "LARGER"),
    ],
)
def test_compare(tmp_path, capsys, seconds, working_bytes, spread, code, word):
    before = document_of(tmp_path / "a.json", 1.0)
    after = document_of(tmp_path / "b.json", seconds, working_bytes, spread)
    assert compare.main([before, after]) == code
    assert word in capsys.readouterr().out


def test_compare_reads_the_other_benchmark(capsys):
    path = str(machine.ROOT / "benchmarks" / "results" / "avx512.json")
    assert compare.main([path, path]) == 0
    assert "lrd 1x256x8 row, forward" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.alone
def test_quick_ratios_have_a_floor(tmp_path):
    """Ratios, not times: far below what an idle machine shows, far above what a lost kernel would."""
    if reason := methods.unavailable("lrd"):
        pytest.skip(reason)
    path = tmp_path / "scaling.json"
    assert scaling.main(["--quick", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    for rank in (8, 64):
        xs, times = plot.ratio(document, "torch", rank, "row", lambda p: p["forward_backward"]["min"])
        _, sizes = plot.ratio(document, "torch", rank, "row", lambda p: p["forward_backward"]["working_bytes"])
        assert xs[-1] == 1 << 18
        assert times[-1] >= 2.0
        assert sizes[-1] >= 1.5


def test_disturbed_points_are_measured_once_more(run, monkeypatch):
    invented = runner.measure
    calls = []

    def measure(curve, S, document, options):
        calls.append((curve.name, S))
        busy = 0.5 if (curve.method, S) == ("torch", 1024) and calls.count((curve.name, S)) == 1 else 0.0
        return invented(curve, S, document, options) | {runner.OTHER_WORK: busy}

    monkeypatch.setattr(runner, "measure", measure)
    run()
    assert [call for call in calls if calls.count(call) > 1] == [("torch 8 row", 1024)] * 2
    assert all(p[runner.OTHER_WORK] == 0.0 for p in json.loads(run.path.read_text())["points"])
    assert len(points(run.path)) == len(set(points(run.path)))


def test_documents_are_drawn_together(run, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda document, output: drawn.append(document) or [output])
    run()
    first = json.loads(run.path.read_text())
    curve = Curve("torch", 8, "row")
    ended = {"curve": curve.name, **curve._asdict(), "variables": 8192, "status": "budget", "reason": "enough"}
    went_on = {"curve": curve.name, **curve._asdict(), "variables": 8192, **record(curve, 8192)}
    first["points"].append(ended)
    found = plot.joined([first, {**first, "points": [went_on]}])
    assert [p["status"] for p in found["points"] if p["curve"] == curve.name] == ["ok"] * 4
    with pytest.raises(ValueError, match="another cpu"):
        plot.joined([first, {**first, "machine": {**first["machine"], "cpu": "another"}}])
    machine.write_json(run.path, first)
    assert plot.main([str(run.path)]) == 0
    assert drawn == [first]


@pytest.mark.parametrize("name", ["diagonal", "full naive", "lrd 8 row"])
def test_parameters_are_the_same_in_every_process(name):
    first, second = (methods.prepare(Curve.parse(name), 64, "cpu")().forward() for _ in range(2))
    assert float(first) == float(second)
