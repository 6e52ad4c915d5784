"""SGLang 0.5.23 on a CPU: its own loader, scheduler and EAGLE worker over stand-in kernels.

SGLang's CPU kernels are distributed as source for AVX512 and AMX only, and without them it does not
even import. `kernels.py` has plain PyTorch in the place of the eleven that a dense target with an
EAGLE head calls, `stand_ins.py` puts it there, together with empty modules for Triton and
torchvision.

Real here: reading config and weights, the modules and their products, norms, RoPE, the output head
shared with the target, softmax and top-k of the draft, the choice of the tree, the scheduling of
requests, memory slots, the rounds of drafting and verifying.

Not real: attention, the arrays that describe a tree to the verification, the greedy walk through
it, and the moving of keys and values; these follow the CPU kernels' results, not their code. GPU
kernels, CUDA graphs, tensor parallelism and the verification of sampled tokens are never touched.

These files run in SGLang's own Python, which has nothing of this project's dependencies: they
import one another, torch, safetensors and SGLang, and nothing else of this project.
"""
