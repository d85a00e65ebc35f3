from moecompile.api import clip_grad_norm_ as clip_grad_norm_
from moecompile.api import full_grads as full_grads
from moecompile.api import full_state_dict as full_state_dict
from moecompile.api import load_optimizer_state_dict as load_optimizer_state_dict
from moecompile.api import metrics as metrics
from moecompile.api import optimizer_state_dict as optimizer_state_dict
from moecompile.api import parallelize as parallelize
from moecompile.api import trace as trace
from moecompile.api import update_expert_bias as update_expert_bias
from moecompile.capture import mark_moe as mark_moe
from moecompile.errors import CaptureError as CaptureError
from moecompile.errors import MoeCompileError as MoeCompileError
from moecompile.errors import PassError as PassError
from moecompile.errors import PlanError as PlanError
from moecompile.errors import VerifyError as VerifyError
from moecompile.launch import launch as launch
from moecompile.plan import Plan as Plan
from moecompile.program import Program as Program
from moecompile.simulate import simulate_ranks as simulate_ranks
from moecompile.text import load as load
from moecompile.verification import verify as verify

__version__: str
