# docker build -t mpjax . && docker run --rm mpjax              what this machine runs well
# docker run --rm -v "$PWD/outputs:/mpjax/outputs" mpjax make demo   train in four precisions, picture in outputs/
# docker build -t mpjax --build-arg JAX=jax[cuda12] . && docker run --rm --gpus all mpjax
FROM python:3.13-slim

ARG JAX=jax
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*

WORKDIR /mpjax
COPY . .
RUN python -m venv .venv \
    && .venv/bin/python -m pip install --no-cache-dir --editable '.[dev]' "${JAX}" \
    && touch .venv/.mpjax-dev-jax-newest
ENV PATH=/mpjax/.venv/bin:$PATH
CMD ["python", "-m", "mpjax"]
