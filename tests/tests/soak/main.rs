//! A million rows served while adapters come and go: every output row is the one that the adapter named by the row's lease
//! gives, generation included.
//!
//! Adapters say who they are: an adapter's delta on the served rows is its name and a version that no other contents ever had,
//! digit by digit, so that a row of another adapter, of another version, of a half-written slot or of stale tables cannot pass.
//! Serving threads check rows; changing threads bring contents in step by step, abandon them, let their uploads fail, unload and
//! rotate.

mod changing;
mod contents;
mod faulty;
mod serving;

use changing::Change;
use contents::{Contents, model};
use faulty::FaultyUploads;
use lora_kernels::host::HostOptions;
use lora_kernels::testing::WatchedHost;
use lora_runtime::weights::device::DeviceMemory;
use lora_runtime::weights::{LoraModule, ModuleSet};
use lora_runtime::{LoraRuntime, RuntimeOptions};
use serving::{Memory, Serve};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Rows that the whole run serves at least.
const ROWS: u64 = 1_000_000;

/// Changes that the whole run begins at least.
const CHANGES: u64 = 4000;

const SLOTS: u32 = 6;
const SERVING_THREADS: u64 = 3;
const CHANGING_THREADS: u64 = 2;

/// Marsaglia's xorshift64: enough to mix requests and verbs.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ (seed << 32 | 1))
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// What all threads share.
struct Soak {
    runtime: LoraRuntime,
    contents: Contents,
    served: AtomicU64,
    begun: AtomicU64,
    /// A row was wrong, or a thread has panicked: there is nothing more to learn.
    found: AtomicBool,
}

/// Ends the run where its thread panics, which others would otherwise wait for.
struct EndOnPanic<'a>(&'a Soak);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.found.store(true, Ordering::Relaxed);
        }
    }
}

impl Soak {
    fn done(&self) -> bool {
        if self.found.load(Ordering::Relaxed) {
            return true;
        }
        self.served.load(Ordering::Relaxed) >= ROWS && self.begun.load(Ordering::Relaxed) >= CHANGES
    }
}

/// What a run saw.
#[derive(Debug, Default)]
struct Tally {
    serve: Serve,
    change: Change,
}

/// Serves at least [`ROWS`] rows beside at least [`CHANGES`] changes, or until a row is wrong. `memory` is what serving threads do about adapters that they remember from earlier steps.
fn soak(memory: Memory) -> Tally {
    let options = HostOptions {
        threads: 1,
        memory_limit: Some(64 << 20),
        ..HostOptions::default()
    };
    let backend = Arc::new(WatchedHost::new(options, FaultyUploads).expect("a host backend"));
    let free = || backend.memory_info().expect("a host knows").free;
    let free_before = free();
    let mut runtime_options = RuntimeOptions::new(SLOTS, 1);
    runtime_options.pool.modules = ModuleSet::from_iter([LoraModule::QProj]);
    runtime_options.pool.policy.allow_rotation = true;
    let runtime = LoraRuntime::new(Arc::clone(&backend) as Arc<_>, model(), runtime_options);
    let soak = Soak {
        runtime: runtime.expect("a small pool"),
        contents: Contents::default(),
        served: AtomicU64::new(0),
        begun: AtomicU64::new(0),
        found: AtomicBool::new(false),
    };
    changing::fill(&soak);
    let mut tally = Tally::default();
    std::thread::scope(|scope| {
        let soak = &soak;
        let serving: Vec<_> = (0..SERVING_THREADS)
            .map(|seed| scope.spawn(move || serving::run(soak, Random::new(seed), memory)))
            .collect();
        let changing: Vec<_> = (0..CHANGING_THREADS)
            .map(|seed| scope.spawn(move || changing::run(soak, Random::new(100 + seed))))
            .collect();
        for thread in serving {
            tally.serve += thread.join().expect("a serving thread ends");
        }
        for thread in changing {
            tally.change += thread.join().expect("a changing thread ends");
        }
    });
    for slot in 0..SLOTS {
        assert_eq!(soak.runtime.weights().slot_ref_count(slot), Some(0));
        let _ = soak.runtime.unload(slot);
    }
    drop(soak);
    assert_eq!(free(), free_before, "memory was leaked");
    tally
}

#[test]
fn a_million_rows_are_served_by_the_adapters_that_their_leases_name() {
    let tally = soak(Memory::Checked);
    println!("{tally:?}");
    assert_eq!(tally.serve.wrong, 0, "first: {:?}", tally.serve.first_wrong);
    assert!(tally.serve.rows >= ROWS);
    // Nothing of what the run is about was rare.
    let Change {
        promotions,
        swaps,
        abandoned,
        failed,
        unloads,
        rotations,
        ..
    } = tally.change;
    for (what, count) in [
        ("promotions", promotions),
        ("swaps", swaps),
        ("abandoned", abandoned),
        ("failed uploads", failed),
        ("unloads", unloads),
        ("rotations", rotations),
        ("identities served", tally.serve.identities),
        ("adapters gone when asked for again", tally.serve.gone),
        ("unloads that waited for a lease", tally.change.drained),
    ] {
        assert!(count >= 20, "{what}: {count}");
    }
}

#[test]
fn rows_of_another_adapter_are_found_where_generations_are_not_checked() {
    let tally = soak(Memory::Unchecked);
    assert!(tally.serve.wrong > 0, "{tally:?}");
}
