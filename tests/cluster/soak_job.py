"""User script of the soak test: data-parallel training that can be made to fail.

``python job.py EPOCHS SAMPLER PAUSE`` writes the loss of each global batch to output/curve.jsonl. SAMPLER is a JSON
object with the fanouts and other arguments of ``DistNeighborLoader``. PAUSE: seconds to wait after each step. The
global batch has 120 seeds, which 1, 2, 3, 4, 5, 6 or 8 ranks share equally. Rank N fails as soon as the file
/tmp/fault-rankN exists; the file contains the kind of the fault.
"""

BATCH = 120  # global

JOB = f"""
import ctypes, json, os, sys, time, torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
import gnnfleet as gf

class Means(torch.nn.Module):
    def __init__(self, width, classes, layers):
        super().__init__()
        self.first = torch.nn.Linear(width, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 8) for _ in range(layers))
        self.last = torch.nn.Linear(8, classes)

    def forward(self, x, edges):
        h = self.first(x)
        for layer in self.layers:
            total = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            degree = torch.bincount(edges[1], minlength=len(h)).clamp(min=1)
            h = torch.relu(layer(torch.cat([h, total / degree[:, None]], 1)))
        return self.last(h)

def fail(rank):
    path = f"/tmp/fault-rank{{rank}}"
    if not os.path.exists(path):
        return
    kind, kept = open(path).read(), []
    os.remove(path)
    if kind == "exception":
        raise ValueError("no such column: age")
    if kind == "exit":
        sys.stdout.flush()
        os._exit(3)
    if kind == "segfault":
        ctypes.string_at(0)
    while kind == "memory":
        kept.append(bytearray(os.urandom(1 << 20)) * 32)

def main(epochs, sampler, pause):
    rank, folder = int(os.environ["RANK"]), os.environ["GNNFLEET_RUN_DIR"] + "/output"
    dist.init_process_group("gloo")
    world, graph = dist.get_world_size(), gf.open()
    os.makedirs(folder, exist_ok=True)
    curve = open(f"{{folder}}/curve.jsonl", "w", buffering=1) if rank == 0 else None
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fanouts = sampler.pop("fanouts")
    model = DistributedDataParallel(Means(graph.num_features, graph.num_classes, len(fanouts)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = gf.DistNeighborLoader(graph, fanouts, "train", batch_size={BATCH} // world, shuffle=True, **sampler)
    log = gf.StepLog(model, optimizer, loader, checkpoint_seconds=0.5)
    start = log.restore()
    for epoch in range(start.epoch, epochs + 1):
        first, value = start.first_step(epoch), 0.0
        loader.set_epoch(epoch - 1, first)
        for step, batch in enumerate(loader, first):
            n = batch.batch_size
            own = cross_entropy(model(batch.x.float(), batch.edge_index)[:n], batch.y[:n], reduction="sum")
            total = torch.tensor([float(own.detach()), n], dtype=torch.float64)
            dist.all_reduce(total)
            optimizer.zero_grad()
            (own * world / float(total[1])).backward()
            optimizer.step()
            value = float(total[0] / total[1])
            log.step(epoch, step, len(loader), value, n)
            if curve:
                print(json.dumps({{"epoch": epoch, "step": step, "loss": value}}), file=curve)
            fail(rank)
            time.sleep(pause)
        log.epoch(epoch, value)
    log.close()
    dist.barrier()
    graph.close()
    dist.destroy_process_group()

main(int(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3]))
"""
