# The command `shaderlm` with its server, for CPUs and NVIDIA GPUs.
#   docker build -t shaderlm .
#   docker run -p 8080:8080 -v shaderlm:/models shaderlm
#   docker run -p 8080:8080 -v shaderlm:/models --gpus all shaderlm serve --host 0.0.0.0 --device discrete
FROM python:3.13-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim-bookworm
# Vulkan's loader, and what NVIDIA's driver links. The driver itself comes from the host's container toolkit, which
# mounts its Vulkan part only with the capability `graphics`.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libegl1 libvulkan1 libxext6 \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,graphics,utility
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[serve,cpu,vision]" && rm -r /wheels
RUN useradd --create-home --uid 1000 shaderlm && install --directory --owner=shaderlm /models
USER 1000
ENV SHADERLM_CACHE=/models HF_HOME=/models/huggingface
VOLUME /models
EXPOSE 8080
ENTRYPOINT ["shaderlm"]
CMD ["serve", "--host", "0.0.0.0"]
