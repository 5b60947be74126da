"""A serving loop with the pool: a tiny transformer with paged KV. Run it twice: the second process has the first one's pages."""

import torch

import umbp

TOKENS, PAGES, LAYERS, WIDTH, WORDS = 16, 32, 4, 64, 512
torch.set_default_dtype(torch.float64)  # a batch of another shape rounds otherwise; here that is far too little to change a token
torch.manual_seed(0)  # stands for a checkpoint: the same weights in every process
embed, place, head = torch.randn(WORDS, WIDTH), torch.randn(PAGES * TOKENS, WIDTH), torch.randn(WIDTH, WORDS)
weights = torch.randn(LAYERS, 4, WIDTH, WIDTH) / WIDTH**0.5
kv = {name: [torch.zeros(PAGES * TOKENS, WIDTH) for _ in range(LAYERS)] for name in ("key", "value")}  # a row is a token's slot


def forward(ids, start, wait=lambda layer: True):
    """The next token: computes ``ids[start:]`` and keeps their KV; that of those before is in its rows, or comes layer by layer."""
    x, seen = embed[ids[start:]] + place[start : len(ids)], rows[: len(ids)]
    future = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[start:]
    for layer, (keys, values, (q, k, v, o)) in enumerate(zip(kv["key"], kv["value"], weights, strict=True)):
        wait(layer)  # later layers may still be on their way
        keys[seen[start:]], values[seen[start:]] = x @ k, x @ v
        x = torch.layer_norm(x + (x @ q @ keys[seen].T / WIDTH**0.5 + future).softmax(-1) @ values[seen] @ o, (WIDTH,))
    return int((x[-1] @ head).argmax())


loader = umbp.Loader(umbp.connect().namespace(model="tiny", page_tokens=TOKENS, layout=umbp.Layout.of(kv, page_tokens=TOKENS)), kv)
prompt = torch.randint(WORDS, (200,)).tolist()
torch.seed()  # what follows differs from process to process
slots = torch.randperm(PAGES)  # an allocator's choice: pages in any order
rows = (slots[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
hashes = umbp.page_keys(prompt[:-1], page_tokens=TOKENS)  # the last token is always computed: the next one follows from it
found = loader.lookup(hashes)
load = loader.load(hashes[:found], slots[:found])
ids = [*prompt, forward(prompt, found * TOKENS, load.wait)]
if len(missing := load.finish().missing):  # evicted between lookup and load, or the pool died: from there on, once more
    ids[-1] = forward(prompt, int(missing[0]) * TOKENS)
while len(ids) < 240:
    ids.append(forward(ids, len(ids) - 1))
loader.offload(umbp.page_keys(ids, page_tokens=TOKENS), slots[: len(ids) // TOKENS]).result()  # what is stored is not even read
print(f"{found - len(missing)} pages loaded; the same without:", ids[200:] == [forward(ids[:n], 0) for n in range(200, 240)], *ids[200:])
