# Training with PyTorch: attention has gradients, and torch.compile takes the model whole.
import flashjit
import torch

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


class Layer(torch.nn.Module):
    def __init__(self, heads=4, head_dim=32):
        super().__init__()
        self.heads, self.head_dim, hidden = heads, head_dim, heads * head_dim
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.out = torch.nn.Linear(hidden, hidden)
        self.slopes = torch.nn.Parameter(torch.linspace(0.1, 0.4, heads, dtype=torch.float32))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        o = flashjit.attention(q, k, v, mask="causal", score="alibi", alibi_slopes=self.slopes, dropout_p=0.1)
        return x + self.out(o.flatten(2))


torch.manual_seed(0)
model = torch.nn.Sequential(Layer(), Layer()).to(device, dtype)
for layer in model:
    layer.slopes.data = layer.slopes.data.float()
step = torch.compile(model, fullgraph=True, backend="aot_eager")  # the default backend, where it has a compiler
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(2, 128, 128, device=device, dtype=dtype)
losses = []
for _ in range(10):
    loss = (step(x) - x.roll(1, 1)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("the loss falls:", losses[-1] < losses[0])
