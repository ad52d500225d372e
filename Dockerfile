# An image with the command and the HTTP server; models are fetched at the first use, into the volume /models.
#
#   docker build -t foreword .
#   docker run --rm -v foreword-models:/models -p 8000:8000 -e FOREWORD_SERVE_API_KEY=… foreword     the server
#   docker run --rm -v foreword-models:/models -it foreword chat                          any other command
FROM python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254 AS build
# The compiler has the version of the base image's distribution, with its security updates.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
# Packages as they were locked, each verified by its hash; cmake and the like stay in this stage.
COPY tools/locked/build.txt tools/locked/serve.txt /locked/
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes -r /locked/build.txt \
 && python -m venv /opt/foreword \
 && /opt/foreword/bin/pip install --no-cache-dir --require-hashes -r /locked/serve.txt
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE THIRD_PARTY_NOTICES.md ./
COPY native native
COPY src src
RUN PATH=/opt/build/bin:$PATH pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels . \
 && /opt/foreword/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

FROM python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254
RUN useradd --create-home --uid 1000 foreword \
 && install --directory --owner foreword --group foreword /models
COPY --from=build /opt/foreword /opt/foreword
ENV PATH=/opt/foreword/bin:$PATH FOREWORD_HOME=/models HF_HOME=/models/huggingface PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/foreword
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["foreword"]
CMD ["serve", "--host", "0.0.0.0", "--require-key"]
