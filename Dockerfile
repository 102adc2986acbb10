# Gateway, engine and supervisor in one image. The CPU build of torch is enough without a GPU; pass TORCH_INDEX_URL
# to take it (or a CUDA build) from the index of your choice.
FROM python:3.11-slim
ARG TORCH_INDEX_URL=""
WORKDIR /opt/trunkline
COPY pyproject.toml constraints.txt README.md LICENSE THIRD_PARTY_NOTICES ./
COPY app app
COPY engine engine
COPY kernels kernels
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch \
 && pip install --no-cache-dir -c constraints.txt . \
 && useradd --create-home trunkline \
 && install -d -o trunkline /var/lib/trunkline
USER trunkline
VOLUME /var/lib/trunkline
EXPOSE 8000
ENTRYPOINT ["trunkline"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000", "--state-dir", "/var/lib/trunkline"]
