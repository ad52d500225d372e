# An image with the command and the HTTP server; models are fetched at the first use, into the volume /models.
#
#   docker build -t foreword .
#   docker run --rm -v foreword-models:/models -p 8000:8000 -e FOREWORD_SERVE_API_KEY=… foreword     the server
#   docker run --rm -v foreword-models:/models -it foreword chat                          any other command
FROM python:3.12-slim-bookworm AS build
# The compiler has the version of the base image's distribution, with its security updates.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY native native
COPY src src
RUN python -m venv /opt/foreword \
 && /opt/foreword/bin/pip install --no-cache-dir '.[serve,grammar,hub,templates]'

FROM python:3.12-slim-bookworm
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
