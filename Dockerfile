# diffjax for CPUs. Untested: this file has not been built by Docker.
#
#   docker build -t diffjax .
#   docker run --rm -v "$PWD/runs:/workspace/runs" \
#     -v "$HOME/.cache:/root/.cache" diffjax train --config=tiny
FROM python:3.12-slim

COPY . /opt/diffjax
RUN pip install --no-cache-dir /opt/diffjax

WORKDIR /workspace
ENTRYPOINT ["diffjax"]
