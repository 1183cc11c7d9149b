"""meshdsl: tensor programs over named dims, laid out on device meshes by one line."""

from meshdsl.array import NamedArray, Spec, named, spec
from meshdsl.autodiff import grad, value_and_grad
from meshdsl.derivatives import hessian_vector_product, jacobian, jvp
from meshdsl.dims import Dimension, Shape, dims
from meshdsl.graph import Graph, TracedTensor
from meshdsl.inspection import inspect
from meshdsl.jit import jit, place
from meshdsl.layouts.layout import Layout
from meshdsl.mesh import Mesh
from meshdsl.module import Module, static
from meshdsl.ops import *  # noqa: F403
from meshdsl.ops import fft, linalg, random
from meshdsl.ops.activations import *  # noqa: F403
from meshdsl.ops.bits import *  # noqa: F403
from meshdsl.ops.complex_numbers import *  # noqa: F403
from meshdsl.ops.elementwise import *  # noqa: F403
from meshdsl.ops.special import *  # noqa: F403
from meshdsl.policy import Policy
from meshdsl.tensor import Tensor
