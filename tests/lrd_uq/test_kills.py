"""Runs that are killed and terminated at random moments, from the settings to the last save: nothing is lost, and the
run that is started again until it ends has the weights and the log of one that was left alone."""

import os
import subprocess
import sys

import pytest
from small import FEW

ATTACK = """
import os, random, signal, sys, time, warnings
from pathlib import Path
import torch
from lrd_uq import checkpoints, cli, settings
from lrd_uq.metrics import read_metrics
warnings.simplefilter("ignore")
torch.set_num_threads(1)
disk, runs, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
rng = random.Random(int(os.environ.get("SEED", "0")))
counts = dict.fromkeys(("runs", "kills", "terms", "in_save", "resumed"), 0)

def start(run):
    pid = os.fork()
    if not pid:
        out = os.open(disk / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        os._exit(cli.main([*words, "--run", str(run)]))
    return pid

def ended(pid):
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None

def content(run):
    found = checkpoints.newest(run)
    return None if found is None else found.content

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

whole = disk / "whole"
assert cli.main([*words, "--run", str(whole)]) == 0  # here, so that the others have all modules when they begin
before = time.monotonic()
assert wait(start(disk / "timed")) == 0
takes = time.monotonic() - before
wanted, log = content(whole), read_metrics(whole)
last = wanted["global_step"]
for number in range(runs):
    run, step, status = disk / f"run{number}", 0, None
    while status != 0:
        pid, begun = start(run), time.monotonic()
        delay, sign = rng.uniform(0, 1.2 * takes), rng.choice((signal.SIGKILL, signal.SIGTERM))
        aims = rng.random() < 0.5  # at a save
        while (status := ended(pid)) is None:
            saving = aims and (run / f"last.ckpt.{pid}.unfinished").exists()
            if saving or time.monotonic() - begun > delay + aims * takes:
                os.kill(pid, sign)
                status = wait(pid)
                counts["kills" if sign == signal.SIGKILL else "terms"] += 1
                counts["in_save"] += saving
                break
            time.sleep(0 if aims else 0.002)
        said = (disk / "said").read_text()
        assert "Traceback" not in said, said
        found = content(run) if run.exists() else None
        now = 0 if found is None else found["global_step"]
        assert now >= step, f"step {step} is lost: {now}"
        counts["resumed"] += now > 0 and status != 0
        step = now
        if status == 0:
            assert now == last, (now, said)
        elif sign == signal.SIGKILL:
            assert status == -signal.SIGKILL, (status, said)
        else:  # before the handler is there, it ends the process as any other
            assert status in (143, -signal.SIGTERM), (status, said)
            if status == 143:
                assert "stopped by SIGTERM after step" in said, said
        if run.exists():
            read_metrics(run)
    state = content(run)["state_dict"]
    for key, value in wanted["state_dict"].items():
        same = torch.equal(value, state[key]) if isinstance(value, torch.Tensor) else value == state[key]
        assert same, f"run {number}: {key} differs"
    found = read_metrics(run)
    for name in ("loss", "identity", "val_log_prob"):
        assert found[name] == log[name], (number, name, found[name], log[name])
    assert not list(run.glob("*.unfinished")), os.listdir(run)
    counts["runs"] += 1
    os.system(f"rm -rf {run}")
print("held", counts, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["here", "tmpfs"])
def test_runs_killed_at_random_moments_lose_nothing(place, tmp_path):
    """`tmpfs`: the run is on another file system than the temporary folder, in a mount namespace of its own."""
    command = [sys.executable, "-W", "ignore", "-c", ATTACK, str(tmp_path), os.environ.get("RUNS", "6"), "fit"]
    command += ["--config", "digits_dropout", *FEW, "--data.init_args.steps_per_epoch", "2"]
    if place == "tmpfs":
        mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64m none "$0" && exec "$@"', str(tmp_path)]
        if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no private mount namespace here")
        command = [*mount, *command]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "held" in done.stdout
    print(done.stdout.splitlines()[-1])
