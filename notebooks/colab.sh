#!/bin/sh
# Installs the checkout that this file is in, on Colab, with JAX for the machine's device. CUDA 12 is what Colab's driver
# supports. Not the extra notebooks: its ipykernel would replace the one that Colab runs.
set -e
jax=jax
if nvidia-smi > /dev/null 2>&1; then
  jax='jax[cuda12]'
elif [ -n "$COLAB_TPU_ADDR$TPU_NAME$TPU_ACCELERATOR_TYPE" ] || [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ]; then
  jax='jax[tpu]'
fi
python3 -m pip install -q -e "$(dirname "$0")/..[train,glue,graph]" "$jax"
