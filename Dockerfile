# Build arguments:
#   PYTHON_VERSION  Python of the base image
#   TORCH_INDEX     where pip gets torch from. PyTorch's index of CPU wheels unless set: on Linux the wheels of the package index
#                   bring a gigabyte of CUDA libraries. Empty: no index of its own, so that is the GPU image. Or the URL of a CUDA index.
#   MODEL           another model to bake in: a folder of the build context, or a hub id (owner/name, owner/name@revision)
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/attend
# One layer for torch, one for the rest, one for the project: what changes often comes last.
RUN pip --python /opt/attend/bin/python install torch==2.13.0 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
COPY requirements.lock /src/
RUN pip --python /opt/attend/bin/python install -r /src/requirements.lock
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY models models
COPY service service
# setuptools, a build tool, goes after the last build; the tests, headers and build tools that torch and others carry go as well.
# torch_shm_manager stays: torch looks for it when it is imported.
RUN pip --python /opt/attend/bin/python install --no-deps --no-build-isolation . \
 && pip --python /opt/attend/bin/python uninstall -y setuptools \
 && cd /opt/attend/lib/python3*/site-packages \
 && find . -type d \( -name tests -o -name test \) -prune -exec rm -rf {} + \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && rm -rf torch/include torch/share/cmake _distutils_hack distutils-precedence.pth

FROM build AS model
ARG MODEL=
COPY . /context
WORKDIR /context
# Opening it here makes a broken or unsafe checkpoint an error of the build. The folder is there even if it stays empty.
RUN mkdir -p /opt/models/hub \
 && if [ -d "${MODEL:-.none}" ]; then mkdir -p "/opt/models/$MODEL" && cp -r "$MODEL/." "/opt/models/$MODEL"; fi \
 && if [ -n "$MODEL" ]; then cd /opt/models && HF_HUB_CACHE=/opt/models/hub /opt/attend/bin/python -c \
    'import sys; from models.checkpoint import load; print(load(sys.argv[1]).name)' "$MODEL"; fi \
 && rm -rf /opt/models/hub/.locks && chmod -R a+rX /opt/models

FROM python:${PYTHON_VERSION}-slim
ARG VERSION=0.1.0
ARG REVISION=
ARG MODEL=
LABEL org.opencontainers.image.title="attend" \
      org.opencontainers.image.description="Contextual embeddings with the attention left in" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# pip of the base image is of no use here. /models is writable by whatever user the platform chooses.
RUN find / -xdev \( -name pip -o -name 'pip-*' -o -name 'pip[0-9]*' -o -name ensurepip -o -name setuptools -o -name 'setuptools-*' \) \
      -prune -exec rm -rf {} + \
 && mkdir -m 1777 /models && echo 'attend:x:10001:10001::/tmp:/sbin/nologin' >> /etc/passwd && echo 'attend:x:10001:' >> /etc/group
COPY --from=build /opt/attend /opt/attend
COPY --from=model /opt/models /opt/models

# HF_HOME is what may be written at run time: checkpoints that are not in the image. A baked model is read from /opt/models instead,
# and then nothing is ever fetched. USER and HOME serve a user id that /etc/passwd does not know.
ARG BAKED=${MODEL:+/opt/models/hub}
ENV PATH=/opt/attend/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 USER=attend HOME=/tmp \
    HF_HOME=/models HF_HUB_CACHE=${BAKED:-/models/hub} HF_HUB_OFFLINE=${MODEL:+1} \
    ATTEND_HOST=0.0.0.0 ATTEND_MODEL=${MODEL:-sentence-transformers/all-MiniLM-L6-v2}
WORKDIR /opt/models
VOLUME /models
EXPOSE 8000
USER 10001:10001
# -I and -S leave out everything but the standard library, so that a check costs 30 ms and no proxy setting can mislead it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["/opt/attend/bin/python", "-IS", "-c", \
 "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('ATTEND_PORT', 8000)), timeout=4); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["attend", "serve"]
