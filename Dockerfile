# megads in a container; the entry point is the command `megads`, run by an ordinary user.
#   docker build -t megads .                                                   CPU, about 1.6 GB
#   docker build -t megads:cuda --build-arg VARIANT=cuda \
#       --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .                NVIDIA GPUs; the base contains nvcc
#   docker run --rm --shm-size=2g -v "$PWD:/work" -v megads-cache:/var/cache/megads megads \
#       train experiment=first data.raw='notes/*.txt'
# BASE is any image of Debian or Ubuntu with Python >= 3.11. The CUDA base has the CUDA version of the pinned torch.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS base
# The C++ compiler builds megads' kernels for the machine that the container runs on, at first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/megads
ENV PATH=/opt/megads/bin:$PATH \
    DS_BUILD_OPS=0 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore

FROM base AS wheel
ARG PIP_INDEX_URL
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM base
# Dependencies first: their layers stay when only megads changes. Torch has one of its own, as its index has: the CPU
# builds lie outside of pip's default index. An index of yours: --build-arg TORCH_CPU_INDEX=, PIP_INDEX_URL=.
ARG VARIANT=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
ARG EXTRAS=report
COPY constraints.txt pyproject.toml /opt/megads/
RUN case "$VARIANT" in \
        cpu) pip install --no-deps --constraint /opt/megads/constraints.txt --index-url "$TORCH_CPU_INDEX" torch ;; \
        cuda) pip install --constraint /opt/megads/constraints.txt torch ;; \
        *) echo "VARIANT is cpu or cuda, not '$VARIANT'" >&2; exit 1 ;; \
    esac
RUN python -c 'import sys, tomllib; project = tomllib.load(open(sys.argv[1], "rb"))["project"]; print(*project["dependencies"], *project["optional-dependencies"].get(sys.argv[2], []), sep="\n")' \
        /opt/megads/pyproject.toml "$EXTRAS" >/opt/megads/requirements.txt \
    && pip install --constraint /opt/megads/constraints.txt --requirement /opt/megads/requirements.txt
COPY --from=wheel /wheels /opt/megads/wheels
RUN pip install --no-deps /opt/megads/wheels/*.whl \
    && useradd --create-home --uid 10001 megads \
    && mkdir /work && chown megads /work \
    # Compiled kernels; writable with `docker run --user` too.
    && mkdir -m 1777 /var/cache/megads
ENV XDG_CACHE_HOME=/var/cache/megads
USER 10001
WORKDIR /work
ENTRYPOINT ["megads"]
CMD ["--help"]
