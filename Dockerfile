# Builds kway for CPUs, or for NVIDIA GPUs with --build-arg VARIANT=cu130 (docs/kubernetes.md).
# Debian 12 ships the Python version that constraints.txt is tested with.
ARG DEBIAN=debian:bookworm-slim
ARG VARIANT=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${VARIANT}

FROM ${DEBIAN} AS cpu
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin

# torch includes the CUDA libraries. torch.compile needs the compiler and Python's headers to build
# kernel launchers at run time. NCCL uses Debian's InfiniBand libraries.
FROM cpu AS cu130
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ ibverbs-providers libibverbs1 python3-dev \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin

# ---- dependencies: a large layer that changes only with these two files ----
FROM cpu AS packages
ARG TORCH_INDEX
ARG EXTRAS=data,train,serve,ray,remote,tensorboard
ENV PIP_NO_CACHE_DIR=1 PACKAGES=/opt/kway/lib/python3.11/site-packages
# kway's C extension needs the compiler and Python's headers.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-pip \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv --without-pip /opt/kway
WORKDIR /source
COPY constraints.txt pyproject.toml ./
# Install torch without its dependencies, because torch's index and constraints.txt have different
# versions of them. Then add the installed build, such as 2.13.0+cpu, to the constraints.
RUN pip --python /opt/kway/bin/python install --constraint constraints.txt \
      --no-deps --index-url "$TORCH_INDEX" torch \
 && pip --python /opt/kway/bin/python freeze > torch.txt
# Remove over 100 MB that kway does not use: torch's test programs and Ray's Java libraries.
RUN python3 -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = [project["optional-dependencies"][name] for name in sys.argv[1].split(",") if name]; \
needed = [*project["dependencies"], *sum(extras, [])]; \
print(*(need for need in needed if not need.startswith("kway[")), sep="\n")' "$EXTRAS" > requirements.txt \
 && pip --python /opt/kway/bin/python install --constraint constraints.txt --constraint torch.txt \
      --requirement requirements.txt \
 && rm -rf "$PACKAGES"/torch/test "$PACKAGES"/torch/bin/*[tT]est* "$PACKAGES"/ray/jars

# ---- kway itself: a small layer ----
FROM packages AS built
COPY . .
RUN pip --python /opt/kway/bin/python install --no-deps --root /built .

FROM ${VARIANT} AS runtime
RUN useradd --uid 1000 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin kway \
 && install --directory --owner kway --group kway /work
COPY --from=packages /opt/kway /opt/kway
COPY --from=built /built/opt/kway /opt/kway
# For users without a passwd entry: caches are written to HOME, and torch requires a user name.
ENV PATH=/opt/kway/bin:$PATH HOME=/tmp USER=kway
# Numeric, so that Kubernetes can verify runAsNonRoot.
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["kway"]
CMD ["--help"]

# ---- --target serve: a server with its health check ----
FROM runtime AS serve
EXPOSE 8000
# Uses http.client, because urllib would use a proxy.
HEALTHCHECK --start-period=120s --interval=10s --timeout=5s --retries=3 \
  CMD ["python", "-I", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
CMD ["serve", "/work/bundle", "--host", "0.0.0.0", "--token-file", "/run/secrets/tokens"]

# ---- default target: runs any kway command, as the manifests in k8s/ do ----
FROM runtime AS kway
