"""Runs scripts/train.py with each stage's gradients reduced on the stage's own GPU.

tf_mp sends all reductions of a rank through its first GPU under NCCL, because several GPUs of one
process may wait for each other for ever (horovod#2944). This is the other way, for a comparison on
a real pair: where Horovod seems to lack NCCL, a gradient is reduced where its variable lies.
"""

import pathlib
import runpy

import tf_mp.hvd.reduction

tf_mp.hvd.reduction.nccl_built = lambda: False
runpy.run_path(str(pathlib.Path(__file__).with_name("train.py")), run_name="__main__")
