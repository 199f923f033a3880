"""`tf-mp doctor --run`: some ranks, two devices each, one training step, and its proof."""

import shutil
import subprocess
import sys

from tf_mp.doctor import Check, Wanted

__all__ = ["check", "main"]

_SECONDS = 300
_DONE = "smoke test passed"


def check(wanted: Wanted) -> Check:
    """Runs the smoke test in processes of its own and says how it went."""
    need = f"{wanted.local_ranks} ranks x {wanted.stages} devices take a step"
    command = [sys.executable, "-m", "tf_mp.smoke", str(wanted.stages)]
    if wanted.local_ranks > 1:
        launcher = shutil.which("horovodrun")
        if launcher is None:
            fix = "source .venv/bin/activate, or make setup"
            return Check("smoke test", False, "no horovodrun on PATH", need, fix)
        command = [launcher, "-np", str(wanted.local_ranks), *command]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        fix = "mend what is listed above first; then run the command with -v: " + " ".join(command)
        return Check("smoke test", False, f"no end after {_SECONDS} s", need, fix)
    output = ran.stdout + ran.stderr
    if ran.returncode == 0 and _DONE in output:
        return Check("smoke test", True, _DONE, need)
    lines = [line for line in output.splitlines() if "Error" in line] or output.splitlines()
    fix = "see the whole output of: " + " ".join(command)
    return Check("smoke test", False, lines[-1][:200] if lines else "nothing said", need, fix)


def main(num_stages: int = 2) -> None:
    """One training step of a small model on every rank, reduced over ranks, and its proof.

    Raises:
        RuntimeError: on every rank, when an operation strays or the ranks' weights differ.
    """
    import keras

    import tf_mp
    from tf_mp import request, world

    tf_mp.init(devices_per_rank=num_stages)
    inputs = keras.Input((32,))
    hidden = inputs
    for index in range(num_stages):
        hidden = keras.layers.Dense(32, name=f"dense_{index}")(hidden)
    names = [f"dense_{index}" for index in range(1, num_stages)]
    model = tf_mp.parallelize(keras.Model(inputs, hidden), cuts=names or [1], micro_batches=2)
    request.compile_if_needed(model)
    batch = request.random_batch(model, 8)
    proof = tf_mp.verify_placement(model, batch)
    model.train_on_batch(*batch)
    world.exchange(proof.ok, what="the proof")
    proof.raise_for_strays()
    if world.current().is_root:
        print(_DONE)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
