"""meshdsl: tensor programs over named dims, laid out on device meshes by one line."""

from meshdsl.array import NamedArray, Spec, named, spec
from meshdsl.autodiff import grad, value_and_grad
from meshdsl.dims import Dimension, Shape, dims
from meshdsl.graph import Graph, Tensor
from meshdsl.jit import jit
from meshdsl.layouts.layout import Layout
from meshdsl.mesh import Mesh
from meshdsl.module import Module, static
from meshdsl.nn import attention
from meshdsl.ops import *  # noqa: F403
from meshdsl.ops import random
from meshdsl.policy import Policy
