"""The importer: a program that writes one data set, in TFDS's format, into an empty folder.

`prepare` starts it as a child process, for three reasons: TensorFlow stays untouched in the
process that will train (its devices are still to be chosen, and no GPU may be opened here); a
download that hangs can be ended; and the time limits that TFDS's downloader lacks can be set
without side effects. It ends when its standard input closes, that is with its parent, however that
one died.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tf_mp import idx

__all__ = ["main"]

ANSWER_SECONDS = 5.0
"""How long a host of the data may take to answer at all."""
STALL_SECONDS = 30.0
"""How long a running download may pause."""
_GATEWAY_ERRORS = (407, 502, 503, 504)


def main() -> int:
    """Does the task on the command line; on failure the last line of stderr is the cause."""
    task = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if task["idx_dir"]:
            _import_idx(task["name"], task["stage"], task["idx_dir"])
        else:
            _download(task["name"], task["stage"])
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(f"{type(error).__name__}: {' '.join(lines)[:600]}", file=sys.stderr, flush=True)
        return 1
    return 0


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _import_idx(name: str, stage: str, idx_dir: str) -> None:
    import tensorflow_datasets as tfds

    splits = idx.read_folder(idx_dir)
    images, labels = splits["train"]
    num_classes = 1 + max(int(part.max()) for _, part in splits.values())
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(*images.shape[1:], 1)),
            "label": tfds.features.ClassLabel(num_classes=max(10, num_classes)),
        }
    )
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        version=_version(name),
        features=features,
        split_datasets={split: _Examples(*arrays) for split, arrays in splits.items()},
        data_dir=stage,
        description=f"Imported by tf_mp from IDX files in {Path(idx_dir).name}.",
    )


class _Examples:
    """The examples of one split, as often as TFDS asks; images as PNG, made in parallel."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.labels = images, labels

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        import tensorflow as tf

        pictures = tf.data.Dataset.from_tensor_slices(self.images[..., None])
        pictures = pictures.map(tf.io.encode_png, num_parallel_calls=2).batch(1_000)
        one_by_one = (picture for batch in pictures.as_numpy_iterator() for picture in batch)
        for index, (picture, label) in enumerate(zip(one_by_one, self.labels, strict=True)):
            yield index, {"image": picture, "label": int(label)}


def _version(name: str) -> str:
    """The version under which TFDS itself would store this set, so that `tfds.load` finds ours."""
    import tensorflow_datasets as tfds

    try:
        return str(tfds.builder_cls(name).VERSION)
    except tfds.core.DatasetNotFoundError:
        return "1.0.0"


def _download(name: str, stage: str) -> None:
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=stage)
    for url in _one_url_per_host(builder.url_infos or {}):
        _ask(url)
    _bound_requests()
    builder.download_and_prepare(download_dir=str(Path(stage) / "downloads"))


def _one_url_per_host(urls: Any) -> list[str]:
    hosts = {urllib.parse.urlparse(url).netloc: url for url in urls if url.startswith("http")}
    return list(hosts.values())[:3]


def _ask(url: str) -> None:
    """Asks a host for a file's headers, in a thread because name look-ups have no time limit."""
    outcome: list[Exception | None] = []
    thread = threading.Thread(target=lambda: outcome.append(_answer(url)), daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    host = urllib.parse.urlparse(url).netloc
    if not outcome:
        raise ConnectionError(f"{host} did not answer within {ANSWER_SECONDS:.0f} s")
    if outcome[0]:
        raise ConnectionError(f"{host} cannot be reached ({outcome[0]})")


def _answer(url: str) -> Exception | None:
    request = urllib.request.Request(url, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        return error if error.code in _GATEWAY_ERRORS else None
    except Exception as error:
        return error
    return None


def _bound_requests() -> None:
    """Gives each request of TFDS's downloader a time limit and two retries (not none and ten)."""
    import requests

    unbounded = requests.Session.request

    def bounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("timeout", (ANSWER_SECONDS, STALL_SECONDS))
        for adapter in self.adapters.values():
            adapter.max_retries = adapter.max_retries.new(total=2)
        return unbounded(self, *args, **kwargs)

    requests.Session.request = bounded  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
