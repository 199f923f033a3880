"""Corrects Horovod 0.28.1's source so that it compiles and loads on TensorFlow 2.21.

Corrections, each of which must find the text it replaces exactly once. They can go with the
first Horovod release that supports TensorFlow 2.21 itself.
"""

import pathlib
import sys

CORRECTIONS = (
    # xla_mpi_ops.cc includes XLA headers that moved after TensorFlow 2.14. It only serves
    # Horovod's collectives inside XLA-compiled functions, which tf_mp does not use.
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
        "",
    ),
    # As it is, the library remembers the folder of the environment that it was compiled in, and
    # a wheel from the cache finds no MPI in another. It looks in its own environment first: in
    # lib/ for Open MPI, and beside itself for TensorFlow and NCCL.
    (
        "horovod/tensorflow/CMakeLists.txt",
        'PROPERTIES OUTPUT_NAME "mpi_lib")',
        'PROPERTIES OUTPUT_NAME "mpi_lib" BUILD_WITH_INSTALL_RPATH TRUE\n'
        "    INSTALL_RPATH_USE_LINK_PATH TRUE INSTALL_RPATH\n"
        '    "\\$ORIGIN/../../../..;\\$ORIGIN/../../tensorflow;\\$ORIGIN/../../nvidia/nccl/lib")',
    ),
    # TensorFlow no longer exports AsGpuStreamValue: with CUDA the library compiles and then
    # fails to load with an undefined symbol. The CUDA stream is still to be had from the stream.
    (
        "horovod/tensorflow/mpi_ops.cc",
        "GpuStreamHandle AsGpuStreamValue(Stream* stream);",
        "",
    ),
    (
        "horovod/tensorflow/mpi_ops.cc",
        "#endif // TENSORFLOW_VERSION >= 2011000000\n#endif // HAVE_GPU\n",
        """#endif // TENSORFLOW_VERSION >= 2011000000
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
#endif // HAVE_GPU
""",
    ),
)


def correct(source):
    """Applies every correction to an unpacked Horovod source folder.

    Args:
        source: path of the folder.

    Raises:
        SystemExit: a text to replace is not there exactly once.
    """
    for name, old, new in CORRECTIONS:
        path = pathlib.Path(source) / name
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            sys.exit(
                f"Received {name} with {text.count(old)} places like this: {old!r}. "
                "Expected one: is this Horovod 0.28.1?"
            )
        path.write_text(text.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    correct(sys.argv[1])
