# kway on CPUs, or with --build-arg VARIANT=cu130 on NVIDIA GPUs: docs/containers.md.
# Debian 12, because its Python is the one that constraints.txt is tested on.
ARG DEBIAN=debian:bookworm-slim
ARG VARIANT=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${VARIANT}

FROM ${DEBIAN} AS cpu
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin

# torch brings CUDA's libraries. The compiler and Python's headers are for torch.compile, which
# builds launchers of its kernels while it runs; NCCL looks for InfiniBand in Debian's libraries.
FROM cpu AS cu130
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ ibverbs-providers libibverbs1 python3-dev \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin

# ---- what kway needs: the big layer, which changes with these two files only ----
FROM cpu AS packages
ARG TORCH_INDEX
ARG EXTRAS=data,train,serve,remote,tensorboard
ENV PIP_NO_CACHE_DIR=1 PACKAGES=/opt/kway/lib/python3.11/site-packages
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-pip \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv --without-pip /opt/kway
WORKDIR /source
COPY constraints.txt pyproject.toml ./
# Without dependencies: torch's index has other versions of them than constraints.txt. The build
# that came, such as 2.13.0+cpu, is then a constraint, too.
RUN pip --python /opt/kway/bin/python install --constraint constraints.txt \
      --no-deps --index-url "$TORCH_INDEX" torch \
 && pip --python /opt/kway/bin/python freeze > torch.txt
# Programs that test torch, and Ray's Java, are over 100 MB that nothing here runs.
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
# HOME and USER hold for users without a name, too: caches go there, and torch asks for a name.
ENV PATH=/opt/kway/bin:$PATH HOME=/tmp USER=kway
# A number, so that Kubernetes sees that it is not root.
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["kway"]
CMD ["--help"]

# ---- --target serve: a server with its health check ----
FROM runtime AS serve
EXPOSE 8000
# http.client, for urllib would ask a proxy.
HEALTHCHECK --start-period=120s --interval=10s --timeout=5s --retries=3 \
  CMD ["python", "-I", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
CMD ["serve", "/work/bundle", "--host", "0.0.0.0", "--token-file", "/run/secrets/tokens"]

# ---- the default: any command, as the manifests of k8s/ give it ----
FROM runtime AS kway
