"""What a release of sglang does, found out by running its own Python without a GPU and without torch.

One process imports the wheel's server arguments, models, MoE layers and topk.py; everything that is not sglang's choice
of a path (torch, Triton, flashinfer, kernels, and the rest of sglang) is a stand-in that refuses to be a truth value.
The server arguments are resolved, the model's MoE block is built and its TopK is called by the release's own code, and
what is reached is written down. Nothing here knows surgeon's rules.
"""
