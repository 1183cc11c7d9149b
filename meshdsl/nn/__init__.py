"""Layers as functions of named tensors, written in the language itself."""

from meshdsl.nn import initializers
from meshdsl.nn.attention import attention
from meshdsl.nn.losses import softmax_cross_entropy
from meshdsl.nn.mlp import gated_mlp, mlp
from meshdsl.nn.norms import layer_norm, rms_norm
from meshdsl.nn.positions import Rotation, rotary, rotation
