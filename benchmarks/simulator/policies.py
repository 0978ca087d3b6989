"""What to rent, by the published rules of several systems, by this project's planner, and by one who knows the truth.

A rule sees what its system measures: a profile, or rates of the running job with noise. Rules that choose no type of node get the cheapest
type per GPU, and the cheapest per core. The size of one of their workers is a node, as their papers deploy them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulator.flow import flow
from benchmarks.simulator.job import Fleet, Floats, Ints
from benchmarks.simulator.probing import probe
from benchmarks.simulator.steady import Steady, steady
from benchmarks.simulator.workloads import Question
from offload.adapt.cores import CorePrice, CoresLearned, InputSeen, count_cores
from offload.errors import ConfigError
from offload.model import Candidate, Catalog, NodeType, Profile, plan

SEEN = 0.01
"""Standard deviation of a rate that a running job measures."""
BATCHES = 16
"""Global batches that the exhaustive search tries, spaced geometrically, beside those that a policy chose."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Nodes, the global batch, the cores of each GPU node that preprocess (None: all that are free), and the training GPUs (None: all)."""

    host: NodeType
    hosts: int
    helper: NodeType | None
    helpers: int
    batch: int
    host_cores: float | None = None
    training: int | None = None

    @property
    def fleet(self) -> Fleet:
        """The nodes."""
        return self.with_helpers(np.array(max(self.helpers, 0)))

    def with_helpers(self, helpers: Ints) -> Fleet:
        """The same GPU nodes with so many CPU nodes."""
        return Fleet(
            host=self.host, hosts=np.array(self.hosts), helper=self.helper, helpers=helpers, training=self.training
        )

    @property
    def name(self) -> str:
        """``8 × ml.g5.xlarge + 2 × ml.c5.4xlarge, batch 512``."""
        far = "" if self.helper is None or not self.helpers else f" + {self.helpers} × {self.helper.name}"
        return f"{self.hosts} × {self.host.name}{far}, batch {self.batch}"

    def judged(self, question: Question) -> Steady:
        """What it is worth in truth."""
        return steady(question.job, self.fleet, self.batch, spot=question.spot, host_cores=self.host_cores)


class Observed:
    """A running job on the default nodes, as a rule that scales its workers sees it: every look has new noise."""

    def __init__(self, question: Question, rng: np.random.Generator) -> None:
        self.question, self._rng = question, rng
        self.host = min(question.hosts, key=lambda kind: kind.usd_per_hour / kind.gpus)
        self.helper = min(question.helpers, key=lambda kind: kind.usd_per_hour / (kind.vcpus * kind.core_speed))
        self.hosts = question.gpus // self.host.gpus
        self.most = question.most_helpers(self.helper)
        self.host_free = max(self.host.vcpus - self.host.gpus * question.job.host_cpus, 0.0)
        self._rates: dict[float, Floats] = {}

    def choice(self, helpers: float, host_cores: float | None = None) -> Choice:
        """So many CPU nodes beside the default GPU nodes."""
        return Choice(
            host=self.host,
            hosts=self.hosts,
            helper=self.helper,
            helpers=int(min(max(helpers, 0), self.most)),
            batch=self.question.job.batches[0],
            host_cores=host_cores,
        )

    def batch_s(self, helpers: int, host_cores: float) -> float:
        """Seconds of a batch."""
        if host_cores not in self._rates:
            fleet = Fleet(
                host=self.host, hosts=np.array(self.hosts), helper=self.helper, helpers=np.arange(self.most + 1)
            )
            job = self.question.job
            at = steady(job, fleet, job.batches[0], spot=self.question.spot, host_cores=host_cores)
            self._rates[host_cores] = np.asarray(at.seen_samples_per_s)
        rate = float(self._rates[host_cores][min(helpers, self.most)])
        return self.question.job.batches[0] / rate * self._noise() if rate > 0 else math.inf

    def device_rate(self) -> float:
        """Samples/s of the accelerators alone."""
        return float(self.choice(0).judged(self.question).device_samples_per_s) * self._noise()

    def node_rate(self) -> float:
        """Samples/s that one CPU node makes."""
        job = self.question.job
        one_end = job.travel_s_per_byte * job.wire_bytes / 2
        return self.helper.vcpus * job.speed(self.helper) / (job.core_seconds + one_end) * self._noise()

    def host_rate(self) -> float:
        """Samples/s of the whole job with the GPU nodes' own cores alone."""
        batch_s = self.batch_s(0, self.host_free)
        return self.question.job.batches[0] / batch_s if math.isfinite(batch_s) else 1e-9

    def price(self, helpers: bool) -> float:
        """Dollars per hour of one CPU node, or of all GPU nodes."""
        one = self.choice(1 if helpers else 0)
        alone = float(self.choice(0).fleet.usd_per_hour(self.question.spot))
        return float(one.fleet.usd_per_hour(self.question.spot)) - alone if helpers else alone

    def _noise(self) -> float:
        return math.exp(SEEN * float(self._rng.standard_normal()))


class View:
    """What policies see of a question: the profile, this project's plan on it, and the running job."""

    def __init__(self, question: Question, seed: int) -> None:
        self.question = question
        self._rng = np.random.default_rng([seed, 1])
        self.profile = probe(question.job, str(question.hosts[0].gpu_model), np.random.default_rng([seed, 2]))
        self.observed = Observed(question, self._rng)

    @functools.cached_property
    def plan(self) -> Candidate:
        """What ``offload plan`` recommends."""
        return _planned(self.question, self.profile)

    def noise(self) -> float:
        """A factor of a measurement."""
        return math.exp(SEEN * float(self._rng.standard_normal()))


Policy = Callable[[View], Choice]


def single_small(view: View) -> Choice:
    """The cheapest node for each GPU, without CPU nodes."""
    return view.observed.choice(0)


def single_large(view: View) -> Choice:
    """The GPU node with the most cores for each GPU, without CPU nodes."""
    host = max(view.question.hosts, key=lambda kind: (kind.vcpus / kind.gpus, -kind.usd_per_hour))
    return replace(view.observed.choice(0), host=host, hosts=view.question.gpus // host.gpus)


def ratio(cores_per_gpu: int) -> Policy:
    """CPU nodes with so many cores for each GPU, whatever the job: a rule of thumb."""

    def policy(view: View) -> Choice:
        observed = view.observed
        return observed.choice(math.ceil(view.question.gpus * cores_per_gpu / observed.helper.vcpus))

    return policy


def adaptdl(view: View) -> Choice:
    """Goodput without an input term, which knows no CPU nodes: the batch of the highest goodput as if data were always ready.

    Qiao et al., "Pollux", OSDI'21, equation 4 and section 3.2; AdaptDL's ``goodput.py``. With an input that takes no time, this project's
    goodput is AdaptDL's, so its code chooses the batch.
    """
    profile = view.profile
    free = replace(profile, input=replace(profile.input, core_seconds_per_sample=1e-12, wire_bytes_per_sample=1e-9))
    host = view.observed.host
    roomy = replace(host, vcpus=host.vcpus + host.gpus * math.ceil(profile.input.host_cpus_per_worker) + 1)
    free = replace(free, input=replace(free.input, ingest_samples_per_s_per_worker=math.inf))
    best = _planned(replace(view.question, hosts=(roomy,), helpers=()), free)
    return replace(view.observed.choice(0), batch=best.batch_size)


def fastflow(view: View) -> Choice:
    """Offload if the GPU is 1.3 times as fast as with local cores alone, and to ``⌈(G − L)/R − 0.1⌉`` more workers than the first.

    Um et al., "FastFlow", VLDB'23, section 4; its artifact: ``cpu_bottleneck_threshold`` and ``estimate_initial_workers``. G, L and R are
    the rates of the GPUs, of local cores, and of one remote worker, which it has started to measure R. Local cores go on.
    """
    observed = view.observed
    device, near, remote = observed.device_rate(), observed.host_rate(), observed.node_rate()
    if device / near <= 1.3:
        return observed.choice(0)
    return observed.choice(max(math.ceil((device - near) / remote - 0.1), 0) + 1)


def tfdata_service(view: View) -> Choice:
    """The consumers' rate over a worker's: ``N = ΣCR / mean WT``, rounded up, all on remote workers.

    Audibert et al., "tf.data service", SoCC'23; TensorFlow's ``auto_scaler.h``. CR is the rate at which a consumer never waits.
    """
    observed = view.observed
    return observed.choice(max(math.ceil(observed.device_rate() / observed.node_rate()), 1), host_cores=0.0)


def cachew(view: View) -> Choice:
    """One remote worker more while the last one cut the batch time by more than 7 %, else back to the one before.

    Graur et al., "Cachew", ATC'22, section 5; its artifact: ``kMinBatchTimeRelativeImprovementUp``. Caching is left out: no sample here
    is the same twice. The rule stops where the next worker adds less than 7 %: at about 14 of them, whatever the job.
    """
    observed, workers = view.observed, 1
    before = observed.batch_s(workers, 0.0)
    while workers < observed.most:
        now = observed.batch_s(workers + 1, 0.0)
        if 1 - now / before <= 0.07:
            break
        workers, before = workers + 1, now
    return observed.choice(workers, host_cores=0.0)


def pecan(view: View) -> Choice:
    """Remote workers while one more saves dollars, then local ones, then fewer remote ones while that saves dollars.

    Graur et al., "Pecan", ATC'24, AutoPlacement; its artifact, ``DynamicWorkerCountUpdateWithLocal_INCDEC`` with ``optimize_cost``. A local
    worker is a tenth of the host's cores: the artifact allows ten. It adds local workers until one makes batches 10 % slower, and
    alternates until neither changes. AutoOrder is left out: no transformation moves here. The artifact's limit of 20 remote workers is
    lifted.
    """
    observed = view.observed
    client, worker = observed.price(helpers=False), observed.price(helpers=True)
    share = observed.host_free / 10
    remote, local = 1, 0
    before = observed.batch_s(remote, 0.0)
    while remote < observed.most:
        now = observed.batch_s(remote + 1, 0.0)
        better = 1 - now / before
        if better * (client + remote * worker) <= worker * (1 - better):
            break
        remote, before = remote + 1, now
    while local < 10 and share > 0:
        first_local, first_remote = local, remote
        before = observed.batch_s(remote, local * share)
        while local < 10:
            now = observed.batch_s(remote, (local + 1) * share)
            if 1 - now / before < -0.10:
                break
            local, before = local + 1, now
        while remote > 0:
            now = observed.batch_s(remote - 1, local * share)
            worse = now / before - 1
            if worker <= worse * (client + (remote - 1) * worker):
                break
            remote, before = remote - 1, now
        if local == first_local or remote == first_remote:
            break
    return observed.choice(remote, host_cores=local * share)


def offload_plan(view: View) -> Choice:
    """This project's: ``offload plan`` on the probed profile, over all types of GPU node that hold the GPUs and all CPU types."""
    question, best = view.question, view.plan
    host = next(kind for kind in question.hosts if kind.name in best.shape)
    helper = next((kind for kind in question.helpers if kind.name in best.shape), None)
    return Choice(
        host=host,
        hosts=best.shape[host.name],
        helper=helper,
        helpers=0 if helper is None else best.shape[helper.name],
        batch=best.batch_size,
        training=best.workers,
    )


def offload_run(view: View) -> Choice:
    """The plan, and then the cores that a run of this project settles on: :func:`offload.adapt.cores.count_cores` on what it measures.

    It may add nodes of the planned CPU type, or release some. Under the objective "time" the plan stays.
    """
    question, choice = view.question, offload_plan(view)
    if question.objective == "time" or choice.helper is None:
        return choice
    job, helper = question.job, choice.helper
    per_node, most = helper.vcpus, question.most_helpers(helper)
    counts = np.arange(most + 1)
    fleet = choice.with_helpers(counts)
    near = round(float(fleet.near_cores(job)))
    truth = steady(job, fleet, choice.batch, spot=question.spot)
    price = CorePrice(
        core=float(np.diff(fleet.usd_per_hour(question.spot))[0]) / per_node,
        rest=float(fleet.usd_per_hour(question.spot)[0]),
        free=near,
    )
    micro = choice.batch / float(fleet.workers)
    unlimited = replace(job, hub=None, link_share=1e9)
    made = np.broadcast_to(flow(unlimited, fleet, local_batch=micro).made, counts.shape)
    learned, nodes = CoresLearned(), choice.helpers
    for _ in range(INTERVALS):
        rate = float(np.broadcast_to(truth.seen_samples_per_s, counts.shape)[nodes])
        device = float(np.broadcast_to(truth.device_samples_per_s, counts.shape)[nodes])
        noisy, cores = rate * view.noise(), near + nodes * per_node
        core = float(made[nodes]) / max(cores, 1) * view.noise()
        bound = rate < 0.95 * device
        seen = InputSeen(
            cores=cores,
            complete=True,
            samples_per_s=noisy,
            bound=bound,
            device_samples_per_s=device * view.noise(),
            core_samples_per_s=noisy / max(cores, 1) if bound else core,
            core_pace_samples_per_s=core,
            busy_core_samples_per_s=core,
        )
        learned, wanted = count_cores(
            learned, seen, bounds=(max(near, 1), near + most * per_node), before=cores, price=price
        )
        nodes = int(min(max(math.ceil((wanted - near) / per_node - 1e-9), 0), most))
    return replace(choice, helpers=nodes)


def own_equations(view: View) -> Choice:
    """The best of all by the simulator's equations, with what the probe and the catalog say in place of the truth.

    No error of this choice is a model's: it shows what the measurements alone cost.
    """
    question, profile = view.question, view.profile
    step = profile.step_time
    believed = replace(
        question.job,
        core_seconds=profile.input.core_seconds_per_sample,
        ingest_samples_per_s=profile.input.ingest_samples_per_s_per_worker,
        # The probe measures between nodes alone.
        step=replace(step, alpha_intra=step.alpha_inter),
        noise=profile.noise,
        speeds={},
        interruptions_per_hour=question.catalog_interruptions,
    )
    return optimum(replace(question, job=believed))[0]


INTERVALS = 20
"""Intervals in which a run measures and decides."""

POLICIES: dict[str, Policy] = {
    "single, small": single_small,
    "single, large": single_large,
    "4 cores a GPU": ratio(4),
    "16 cores a GPU": ratio(16),
    "AdaptDL": adaptdl,
    "FastFlow": fastflow,
    "tf.data service": tfdata_service,
    "Cachew": cachew,
    "Pecan": pecan,
    "offload plan": offload_plan,
    "offload run": offload_run,
}


def optimum(question: Question, others: tuple[Choice, ...] = ()) -> tuple[Choice, float]:
    """The best choice under the truth, and its value: every type, every number of CPU nodes, and ``BATCHES`` global batches.

    ``others``: choices of policies, which it knows, too: it is never worse than any of them.
    """
    best: tuple[float, Choice] | None = None
    for fleet, batch in _shapes(question):
        at = steady(question.job, fleet, batch[:, None], spot=question.spot)
        values = np.broadcast_to(_worse_is_more(question, at), (len(batch), len(fleet.helpers)))
        row, column = np.unravel_index(int(np.argmin(values)), values.shape)
        if best is None or values[row, column] < best[0]:
            helpers = int(fleet.helpers[column])
            best = (
                float(values[row, column]),
                Choice(
                    host=fleet.host,
                    hosts=int(fleet.hosts),
                    helper=fleet.helper if helpers else None,
                    helpers=helpers,
                    batch=int(batch[row]),
                ),
            )
    if best is None:
        raise ValueError(f"no shape of the question {question.name} holds {question.gpus} GPUs")
    for other in others:
        value = value_of(question, other)
        if value < best[0]:
            best = (value, other)
    return best[1], best[0]


def value_of(question: Question, choice: Choice) -> float:
    """What the objective minimises, in truth: dollars per million useful samples, or seconds per million."""
    return float(np.ravel(_worse_is_more(question, choice.judged(question)))[0])


def _worse_is_more(question: Question, at: Steady) -> Floats:
    with np.errstate(divide="ignore"):
        return np.asarray(at.usd_per_million if question.objective == "cost" else 1e6 / at.goodput)


def _shapes(question: Question) -> Iterator[tuple[Fleet, Floats]]:
    least, most = question.job.batches
    batches = np.unique(np.round(np.geomspace(least, most, BATCHES if most > least else 1) / question.gpus))
    for host in question.hosts:
        hosts = np.array(question.gpus // host.gpus)
        for helper in question.helpers:
            counts = np.arange(question.most_helpers(helper) + 1)
            yield (
                Fleet(host=host, hosts=hosts, helper=helper, helpers=counts),
                np.asarray(batches * question.gpus, dtype=float),
            )


def _planned(question: Question, profile: Profile) -> Candidate:
    """The recommendation over host types with different numbers of GPUs: a plan for each number, all else by the product."""
    found: list[Candidate] = []
    most = max((question.most_helpers(kind) for kind in question.helpers), default=0)
    adaptive = question.job.batches[1] > question.job.batches[0] and profile.noise is not None
    catalog = Catalog({kind.name: kind for kind in (*question.hosts, *question.helpers)})
    for gpus in sorted({kind.gpus for kind in question.hosts}):
        hosts = [kind.name for kind in question.hosts if kind.gpus == gpus]
        nodes = question.gpus // gpus
        try:
            made = plan(
                profile,
                catalog,
                gpu_types=hosts,
                gpu_nodes=(nodes, nodes),
                cpu_types=[kind.name for kind in question.helpers],
                cpu_nodes=(0, most),
                objective=question.objective,
                spot=question.spot,
                batch_size=None if adaptive else question.job.batches[0],
                max_batch_size=question.job.batches[1] if adaptive else None,
            )
        except ConfigError:
            continue  # no core is left on these hosts, and there are no CPU types
        # The range of counts applies to all CPU types alike, and larger ones reach the limit of cores sooner.
        allowed = {kind.name: question.most_helpers(kind) for kind in question.helpers}
        found.append(
            next(
                each
                for each in (made.best, *made.candidates)
                if all(count <= allowed.get(name, count) for name, count in each.shape.items())
            )
        )
    if not found:
        raise ConfigError(f"no plan for {question.gpus} GPUs")
    if question.objective == "cost":
        return min(found, key=lambda each: each.usd_per_hour / each.goodput)
    return max(found, key=lambda each: each.goodput)
