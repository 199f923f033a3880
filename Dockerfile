# The image of the main job: TensorFlow, Open MPI, Horovod compiled for them, tf_mp and a data set.
#
#   docker build -t tf_mp .
#   docker run --rm tf_mp                        two ranks train the example
#   docker run --rm tf_mp --steps 100            other arguments go to scripts/train.py
#   docker run --rm tf_mp test                   lint, types and all tests
#   docker run --rm tf_mp bash                   any program by name
#
# For GPUs (CUDA, NCCL, tensorflow[and-cuda]); never run on a GPU so far:
#   docker build --build-arg DEVICE=gpu --build-arg BASE=nvidia/cuda:12.9.1-devel-ubuntu24.04 \
#     -t tf_mp:gpu .
#   docker run --rm --gpus all tf_mp:gpu
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
ARG DEVICE=cpu
ENV DEBIAN_FRONTEND=noninteractive VENV=/opt/tf_mp/.venv DEVICE=${DEVICE} XDG_CACHE_HOME=/tmp/cache
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends ca-certificates g++ make python3 python3-venv >/dev/null \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tf_mp
# the packages and Horovod in a layer of their own: a change of the code does not compile it again
COPY setup.cfg pyproject.toml constraints.txt ./
COPY scripts/bootstrap.sh scripts/
COPY scripts/bootstrap scripts/bootstrap
RUN TF_MP_ONLY=packages bash scripts/bootstrap.sh && rm -rf /tmp/cache /root/.cache
COPY . .
RUN bash scripts/bootstrap.sh && rm -rf /tmp/cache /root/.cache
# Fashion-MNIST comes as a Debian package; any other set is fetched by TFDS (DATASET=mnist)
ARG DATASET=fashion_mnist
RUN if [ "$DATASET" = fashion_mnist ]; then \
        apt-get update -qq && apt-get install -y -qq --no-install-recommends dataset-fashion-mnist >/dev/null \
        && IDX="--idx /usr/share/datasets/fashion-mnist"; \
    fi; \
    .venv/bin/python -m tf_mp data --dataset "$DATASET" --data-dir /opt/tf_mp/data ${IDX:-}
# any user may read all of it, also what came from a checkout with a narrow umask
RUN find /opt/tf_mp -not -perm -o=r -exec chmod a+rX {} +

FROM ${BASE}
ARG DEVICE=cpu
ARG DATASET=fashion_mnist
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 python3-venv >/dev/null \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home tf_mp
COPY --from=build /opt/tf_mp /opt/tf_mp
# Open MPI: its place (also for a single process), root allowed, buffers of ranks in /tmp and not in
# /dev/shm, which is small in containers. Its other settings are in .venv/etc/.
ENV PATH=/opt/tf_mp/.venv/bin:$PATH \
    VENV=/opt/tf_mp/.venv \
    DEVICE=${DEVICE} \
    DATA_DIR=/opt/tf_mp/data \
    TFDS_DATA_DIR=/opt/tf_mp/data \
    TF_MP_DATASET=${DATASET} \
    RUNS_DIR=/tmp/tf_mp/runs \
    OPAL_PREFIX=/opt/tf_mp/.venv \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_btl_vader_backing_directory=/tmp \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/tf_mp
USER tf_mp
ENTRYPOINT ["/opt/tf_mp/scripts/docker_entrypoint.sh"]
