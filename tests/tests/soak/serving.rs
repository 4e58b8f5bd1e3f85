//! Threads that serve rows and look at every one.

use crate::contents::{Code, WIDTH};
use crate::{EndOnPanic, Random, SLOTS, Soak};
use half::bf16;
use lora_runtime::kernels::{DeviceBuffer, Scratch, Stream};
use lora_runtime::weights::{BASE_SLOT, LoraModule, SlotLease};
use lora_runtime::{ModuleOut, RoutedBatch};
use std::collections::HashSet;
use std::ops::AddAssign;
use std::sync::atomic::Ordering;

/// Rows of a step.
const ROWS: usize = 64;

/// Requests that the rows of a step belong to.
const REQUESTS: usize = 8;

/// What a base row holds: a NaN with a payload, which must come through.
const UNTOUCHED: u16 = 0x7fa5;

/// What a thread does about an adapter that it remembers from an earlier step by slot and identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// It serves it only if the slot still holds that generation.
    Checked,
    /// It takes whatever the slot holds: the mistake that generations are there to find.
    Unchecked,
}

/// What was served.
#[derive(Debug, Default)]
pub(crate) struct Serve {
    pub(crate) rows: u64,
    pub(crate) wrong: u64,
    pub(crate) first_wrong: Option<String>,
    /// Distinct adapters, summed over threads.
    pub(crate) identities: u64,
    /// Remembered adapters that were no longer there.
    pub(crate) gone: u64,
}

impl AddAssign for Serve {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.wrong += other.wrong;
        self.first_wrong = self.first_wrong.take().or(other.first_wrong);
        self.identities += other.identities;
        self.gone += other.gone;
    }
}

/// A request that runs in this step: its lease, and who must serve it.
struct Request {
    lease: SlotLease,
    id: u64,
}

/// Buffers of one thread.
struct Step {
    x: DeviceBuffer,
    out: DeviceBuffer,
    batch: RoutedBatch,
    scratch: Scratch,
}

/// Serves until enough rows are served by all threads together.
pub(crate) fn run(soak: &Soak, mut random: Random, memory: Memory) -> Serve {
    let _guard = EndOnPanic(soak);
    let mut step = Step::new(soak);
    let mut serve = Serve::default();
    let mut seen = HashSet::new();
    let mut remembered: Vec<(i32, u64)> = Vec::new();
    while !soak.done() {
        let mut requests = Vec::with_capacity(REQUESTS);
        for _ in 0..REQUESTS {
            let at = random.below(64) as usize;
            let again = (at < remembered.len()).then(|| remembered.swap_remove(at));
            let request = match again {
                Some((slot, id)) => ask_again(soak, slot, id, memory),
                None => ask(soak, &mut random),
            };
            serve.gone += u64::from(again.is_some() && request.is_none());
            requests.extend(request);
        }
        if requests.is_empty() {
            continue;
        }
        let rows: Vec<usize> = (0..ROWS)
            .map(|_| random.below(requests.len() as u64) as usize)
            .collect();
        step.check(soak, &requests, &rows, &mut serve);
        for Request { lease, id } in requests {
            if lease.adapter().is_some() {
                seen.insert(id);
                remembered.push((lease.slot(), id));
            }
        }
        let len = remembered.len();
        remembered.drain(..len.saturating_sub(32));
    }
    serve.identities = seen.len() as u64;
    serve
}

/// A new request: for a slot, for what is active, for the base model.
fn ask(soak: &Soak, random: &mut Random) -> Option<Request> {
    let request = match random.below(u64::from(SLOTS) + 2) {
        slot if slot < SLOTS.into() => slot as i32,
        slot if slot == u64::from(SLOTS) => -1,
        _ => BASE_SLOT,
    };
    let lease = soak.runtime.lease(request)?;
    let id = lease.adapter_id();
    Some(Request { lease, id })
}

/// A request that goes on with an adapter of an earlier step.
fn ask_again(soak: &Soak, slot: i32, id: u64, memory: Memory) -> Option<Request> {
    let lease = soak.runtime.lease(slot)?;
    if memory == Memory::Checked && lease.adapter_id() != id {
        return None;
    }
    Some(Request { lease, id })
}

impl Step {
    fn new(soak: &Soak) -> Self {
        let mut x = vec![bf16::ZERO; ROWS * WIDTH];
        for (row, values) in x.chunks_mut(WIDTH).enumerate() {
            values[0] = bf16::from_f32(first_x(row));
        }
        let rows = ROWS as u32;
        Self {
            x: soak.runtime.buffer(&x).expect("memory"),
            out: soak.runtime.buffer(&x).expect("memory"),
            batch: soak.runtime.batch(rows).expect("memory"),
            scratch: soak.runtime.scratch(rows).expect("memory"),
        }
    }

    /// Serves one step, row `i` for request `rows[i]`, and compares every row.
    fn check(&mut self, soak: &Soak, requests: &[Request], rows: &[usize], serve: &mut Serve) {
        let runtime = &soak.runtime;
        let slots: Vec<i32> = rows.iter().map(|at| requests[*at].lease.slot()).collect();
        let codes: Vec<Option<Code>> = requests
            .iter()
            .map(|request| soak.contents.code(request.id))
            .collect();
        let base: Vec<bf16> = rows
            .iter()
            .flat_map(|at| match requests[*at].lease.adapter() {
                Some(_) => [bf16::ZERO; WIDTH],
                None => [bf16::from_bits(UNTOUCHED); WIDTH],
            })
            .collect();
        self.out.upload(0, &base).expect("in range");
        let batch = &mut self.batch;
        runtime
            .route(batch, Stream::OWN, &slots, ROWS)
            .expect("slots exist");
        let q = ModuleOut {
            module: LoraModule::QProj,
            out: self.out.mat_mut(ROWS, WIDTH, WIDTH).expect("in range"),
        };
        let mut ctx = runtime.context(Stream::OWN, &mut self.scratch);
        let x = self.x.mat(ROWS, WIDTH, WIDTH).expect("in range");
        runtime.apply(&mut ctx, batch, 0, x, [q]).expect("launches");
        let found: Vec<bf16> = self.out.download(0, ROWS * WIDTH).expect("in range");
        for (row, found) in found.chunks(WIDTH).enumerate() {
            let request = &requests[rows[row]];
            let right = match (request.lease.adapter(), codes[rows[row]]) {
                (None, _) => found.iter().all(|value| value.to_bits() == UNTOUCHED),
                (Some(_), Some(code)) => is_of(found, row, &code),
                (Some(_), None) => false,
            };
            if !right {
                serve.wrong += 1;
                soak.found.store(true, Ordering::Relaxed);
                serve.first_wrong.get_or_insert_with(|| {
                    format!("{:?} of {:x} got {found:?}", request.lease, request.id)
                });
            }
        }
        serve.rows += ROWS as u64;
        soak.served.fetch_add(ROWS as u64, Ordering::Relaxed);
    }
}

/// First value of x: rows differ, and every product stays a number that BF16 holds exactly.
fn first_x(row: usize) -> f32 {
    [1.0, 2.0, 0.5, 4.0][row % 4]
}

fn is_of(found: &[bf16], row: usize, code: &Code) -> bool {
    let wanted = code.iter().map(|digit| f32::from(*digit) * first_x(row));
    found
        .iter()
        .zip(wanted)
        .all(|(value, wanted)| value.to_f32() == wanted)
}
