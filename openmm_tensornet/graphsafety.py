import torch
_A=torch.ops.aten
VIEWS={_A.view.default,_A.expand.default,_A.permute.default,_A.transpose.int,_A.t.default,_A.unsqueeze.default,_A.squeeze.dim,_A.select.int,_A.slice.Tensor,_A.split.Tensor,_A.split_with_sizes.default,_A.unbind.int,_A.diagonal.default,_A._unsafe_view.default,_A.detach.default,_A.alias.default}
