"""The measured process of every variant on PyTorch; it starts the second process itself.

`pipeline` is torch.distributed.pipelining on two processes over gloo, `ddp` is
DistributedDataParallel on two processes over gloo, `plain` is one process. The networks are those
of `networks.py`, written for PyTorch: same shapes, batch, loss and optimizer (RMSprop).
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def parse():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=["plain", "pipeline", "ddp"])
    parser.add_argument("network", choices=sorted(NETWORKS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cores", type=int, help="keep the process on its first so many cores")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b", choices=sorted(SCHEDULES))
    return parser.parse_args()


def mnist_cnn():
    """Both blocks of the MNIST network, and a batch of 100."""
    conv = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    dense = nn.Sequential(
        nn.Linear(64 * 7 * 7, 1024), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1024, 10)
    )
    return conv, dense, torch.rand(100, 1, 28, 28), torch.randint(0, 10, (100,))


def mlp():
    """Dense layers of 1024, six a half, and a batch of 512."""
    halves = [
        [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        for _ in range(2)
    ]
    halves[1].append(nn.Linear(1024, 10))
    first, second = (nn.Sequential(*half) for half in halves)
    return first, second, torch.randn(512, 1024), torch.randint(0, 10, (512,))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """(batch, length, width) to the same."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dense(self.norm2(x))


class Logits(nn.Module):
    """The norm and the way back to the vocabulary, classes before positions."""

    def __init__(self, width, vocabulary):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        """(batch, length, width) to (batch, vocabulary, length)."""
        return self.dense(self.norm(x)).transpose(1, 2)


def transformer():
    """Six blocks of width 256 over 64 tokens, and a batch of 32.

    The embedding is not shared with the logits: torch.distributed.pipelining has no weights that
    two stages share. That spares the peer one transfer a step.
    """
    first = nn.Sequential(nn.Embedding(256, 256), *(Block(256) for _ in range(3)))
    second = nn.Sequential(*(Block(256) for _ in range(3)), Logits(256, 256))
    tokens = torch.randint(1, 256, (32, 64))
    return first, second, tokens, tokens.roll(1, 1)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, stride), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.short = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        """(batch, inputs, height, width) to (batch, outputs, height // stride, ...)."""
        return torch.relu(self.body(x) + self.short(x))


#: After how many of the sixteen blocks of ResNet-50 the second stage begins.
RESNET_CUT = int(os.environ.get("RESNET_CUT", "7"))


def resnet50():
    """Sixteen blocks of ResNet-50 on 64 x 64 images, and a batch of 32."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    begin, inputs = len(layers), 64
    for count, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for i in range(count):
            layers.append(Bottleneck(inputs, width, stride if i == 0 else 1))
            inputs = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 10)]
    cut = begin + RESNET_CUT
    first, second = nn.Sequential(*layers[:cut]), nn.Sequential(*layers[cut:])
    return first, second, torch.rand(32, 3, 64, 64), torch.randint(0, 10, (32,))


NETWORKS = {"mnist_cnn": mnist_cnn, "mlp": mlp, "transformer": transformer, "resnet50": resnet50}


def optimizer_of(module):
    """The default RMSprop of Keras: rho 0.9, no momentum."""
    return torch.optim.RMSprop(module.parameters(), lr=0.001, alpha=0.9, eps=1e-7)


def pipeline(args, rank):
    """One stage a process."""
    first, second, x, y = NETWORKS[args.network]()
    module = (first, second)[rank].train()
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    optimizer, loss = optimizer_of(module), nn.CrossEntropyLoss()
    schedule = SCHEDULES[args.schedule](stage, args.micro_batches, loss_fn=loss)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=[])
            optimizer.step()
        dist.barrier()

    return train


def whole(args, rank):
    """The whole network in each process, with DistributedDataParallel where there are two."""
    first, second, x, y = NETWORKS[args.network]()
    module = nn.Sequential(first, second).train()
    if args.way == "ddp":
        module = nn.parallel.DistributedDataParallel(module)
    optimizer, loss = optimizer_of(module), nn.CrossEntropyLoss()

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()

    return train


def rank_main(rank, args, port):
    """One process."""
    import harness

    if args.cores:
        harness.affinity(args.cores)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.way != "plain":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=2)
    train = (pipeline if args.way == "pipeline" else whole)(args, rank)
    train(3)
    harness.serve(train, rank)


def main():
    """Starts the processes."""
    args = parse()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if args.way == "plain":
        return rank_main(0, args, port)
    processes.spawn(rank_main, (args, port), nprocs=2)


if __name__ == "__main__":
    main()
