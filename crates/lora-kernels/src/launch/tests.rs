use super::*;
use crate::host::{HostBackend, HostOptions};
use crate::testing::{
    Batch, BatchShape, DeviceAdapter, DeviceBatch, Fill, HostHooks, Rng, SiteShape, TestAdapter,
    TestBackend, Via, WatchedHost,
};
use crate::{
    DeviceBuffer, LoraAttnWeights, LoraBackend, LoraRows, LoraSite, MatMut, QkvOut, RowGroupsSpec,
    ScratchSpec,
};
use lora_weights::device::{DeviceMemory, DevicePtr};
use std::sync::{Arc, Mutex};

const ROWS: usize = 3;
const K_IN: u32 = 64;
const N_OUT: u32 = 48;

/// A backend, an adapter of rank 4, x, scratch and kernels.
struct Setup {
    backend: Arc<HostBackend>,
    adapter: DeviceAdapter,
    x: DeviceBuffer,
    kernels: LoraKernels,
    scratch: Scratch,
}

impl Setup {
    fn new(options: LaunchOptions) -> Self {
        let backend = Arc::new(HostBackend::new());
        let mut rng = Rng::new(1);
        let adapter = TestAdapter::random(&mut rng, Fill::Signed, 4, (K_IN, N_OUT));
        let memory: Arc<dyn DeviceMemory> = backend.clone();
        let values = rng.values(ROWS * K_IN as usize, Fill::Signed, 1.0);
        let spec = ScratchSpec {
            max_rows: 64,
            max_rank: 16,
            max_sites: 4,
            max_k_in: K_IN,
        };
        Self {
            adapter: adapter.upload(&memory).unwrap(),
            x: DeviceBuffer::from_slice(memory.clone(), &values).unwrap(),
            kernels: LoraKernels::new(backend.clone(), options),
            scratch: Scratch::new(memory, spec).unwrap(),
            backend,
        }
    }

    fn out(&self) -> DeviceBuffer {
        DeviceBuffer::zeroed(self.backend.clone(), (ROWS * N_OUT as usize * 2) as u64).unwrap()
    }

    /// Applies the pair, changed by `change`, to a zeroed out.
    fn apply(&mut self, change: impl FnOnce(&mut PairSite<'_>)) -> Result<Applied, KernelError> {
        let mut buffer = self.out();
        let mut site = PairSite {
            pair: self.adapter.pair,
            out: whole(&mut buffer),
        };
        change(&mut site);
        let x = self.x.mat(ROWS, K_IN as usize, K_IN as usize).unwrap();
        let mut ctx = LaunchContext {
            kernels: &self.kernels,
            stream: Stream::OWN,
            scratch: &mut self.scratch,
        };
        let applied = apply_lora_delta(&mut ctx, SiteKind::DenseFfn, x, &mut [site]);
        if !matches!(applied, Ok(Applied::Launched { .. })) {
            assert!(untouched(&buffer), "nothing is written");
        }
        applied
    }

    fn groups(&self, entries: u32, slots: &[i32]) -> RowGroups {
        let spec = RowGroupsSpec::new(64, entries, 48);
        let mut groups = RowGroups::new(self.backend.clone(), spec).unwrap();
        groups.build_host(slots).unwrap();
        groups
    }
}

fn whole(buffer: &mut DeviceBuffer) -> MatMut<'_> {
    buffer
        .mat_mut(ROWS, N_OUT as usize, N_OUT as usize)
        .unwrap()
}

fn untouched(buffer: &DeviceBuffer) -> bool {
    let values = buffer.download::<u16>(0, ROWS * N_OUT as usize).unwrap();
    values.iter().all(|&bits| bits == 0)
}

fn setup() -> Setup {
    Setup::new(LaunchOptions::default())
}

/// A view of no memory, which every launch must refuse.
fn raw_out(ptr: u64, rows: usize, cols: usize) -> MatMut<'static> {
    MatMut::unbacked(ptr, rows, cols, cols).unwrap()
}

#[test]
fn a_pair_in_order_launches() {
    assert_eq!(setup().apply(|_| ()), Ok(Applied::Launched { launches: 1 }));
}

#[test]
fn ranks_and_widths_outside_the_limits_are_refused() {
    let quantity = |change: fn(&mut PairSite<'_>)| match setup().apply(change).unwrap_err() {
        KernelError::OutOfRange {
            quantity,
            value,
            max,
            ..
        } => (quantity, value, max),
        error => panic!("{error}"),
    };
    assert_eq!(quantity(|s| s.pair.rank = 0), ("rank", 0, 16));
    assert_eq!(quantity(|s| s.pair.rank = 17), ("rank", 17, 16));
    assert_eq!(
        quantity(|s| s.pair.max_rank = 528),
        ("padded rank", 528, 512)
    );
    assert_eq!(quantity(|s| s.pair.max_rank = 0), ("padded rank", 0, 512));
    assert_eq!(quantity(|s| s.pair.k_in = 0), ("k_in", 0, 1 << 20));
    assert_eq!(
        quantity(|s| s.pair.n_out = (1 << 20) + 1),
        ("n_out", (1 << 20) + 1, 1 << 20)
    );
}

#[test]
fn an_unpadded_rank_is_refused() {
    let error = setup().apply(|s| s.pair.max_rank = 20).unwrap_err();
    assert!(matches!(
        error,
        KernelError::UnpaddedRank {
            max_rank: 20,
            granule: 16,
            ..
        }
    ));
}

#[test]
fn sizes_that_do_not_agree_are_refused() {
    let sizes = |change: fn(&mut PairSite<'_>)| match setup().apply(change).unwrap_err() {
        KernelError::SizeMismatch {
            quantity,
            found,
            expected,
            ..
        } => (quantity, found, expected),
        error => panic!("{error}"),
    };
    assert_eq!(sizes(|s| s.pair.k_in = 63), ("columns", 64, 63));
    assert_eq!(sizes(|s| s.pair.n_out = 47), ("columns", 48, 47));
    assert_eq!(sizes(|s| s.out = raw_out(4096, 2, 48)), ("rows", 2, 3));
}

#[test]
fn null_and_unaligned_adapters_are_refused() {
    let null = setup().apply(|s| s.pair.a = DevicePtr::NULL).unwrap_err();
    assert_eq!(null.to_string(), "A of site 0: the address is null");
    let unaligned = setup().apply(|s| s.pair.b = DevicePtr(0x1008)).unwrap_err();
    assert!(matches!(
        unaligned,
        KernelError::Misaligned { align: 16, .. }
    ));
}

#[test]
fn x_and_outs_that_overlap_are_refused() {
    let mut setup = setup();
    let x = setup.x.ptr().0;
    let error = setup.apply(|s| s.out = raw_out(x, 3, 48)).unwrap_err();
    assert_eq!(
        error.to_string().split(':').next(),
        Some("x and out of site 0 overlap")
    );

    let mut buffer = setup.out();
    let (ptr, pair) = (buffer.ptr().0, setup.adapter.pair);
    let x = setup.x.mat(ROWS, 64, 64).unwrap();
    let mut ctx = LaunchContext {
        kernels: &setup.kernels,
        stream: Stream::OWN,
        scratch: &mut setup.scratch,
    };
    // The second out begins at the last element of the first.
    let last = ptr + 2 * (ROWS as u64 * 48 - 1);
    let mut sites = [
        PairSite {
            pair,
            out: whole(&mut buffer),
        },
        PairSite {
            pair,
            out: raw_out(last, 3, 48),
        },
    ];
    let error = apply_lora_delta(&mut ctx, SiteKind::Attention, x, &mut sites).unwrap_err();
    assert_eq!(
        error.to_string().split(':').next(),
        Some("out of site 0 and out of site 1 overlap")
    );
}

#[test]
fn many_sites_take_several_launches() {
    let mut setup = setup();
    let mut buffers: Vec<DeviceBuffer> = (0..9).map(|_| setup.out()).collect();
    let pair = setup.adapter.pair;
    let mut sites: Vec<_> = buffers
        .iter_mut()
        .map(|buffer| PairSite {
            pair,
            out: whole(buffer),
        })
        .collect();
    let x = setup.x.mat(ROWS, 64, 64).unwrap();
    let mut ctx = LaunchContext {
        kernels: &setup.kernels,
        stream: Stream::OWN,
        scratch: &mut setup.scratch,
    };
    let applied = apply_lora_delta(&mut ctx, SiteKind::Attention, x, &mut sites);
    assert_eq!(applied, Ok(Applied::Launched { launches: 3 }));
    let values = |buffer: &DeviceBuffer| buffer.download::<u16>(0, ROWS * 48).unwrap();
    assert!(
        buffers
            .iter()
            .all(|buffer| values(buffer) == values(&buffers[0]))
    );
    assert!(!untouched(&buffers[0]));
}

#[test]
fn a_delta_that_hands_nothing_over_takes_one_pass() {
    /// Keeps the first row, the rows and the scratch of every pass.
    #[derive(Default)]
    struct Passes {
        hands_over: bool,
        seen: Mutex<Vec<(u32, u32, bool)>>,
    }

    impl HostHooks for Passes {
        fn uses_scratch(&self) -> bool {
            self.hands_over
        }

        fn delta(
            &self,
            _: &Arc<HostBackend>,
            _: Stream,
            params: &DeltaParams,
        ) -> Result<(), KernelError> {
            let has_scratch = params.sites[0].partials != 0;
            let mut seen = self.seen.lock().unwrap();
            seen.push((params.pass_first, params.pass_rows, has_scratch));
            Ok(())
        }
    }

    let site = SiteShape {
        n_out: N_OUT,
        gap: 0,
        max_rank: 16,
    };
    let shape = BatchShape {
        seed: 1,
        fill: Fill::Signed,
        k_in: K_IN,
        x_gap: 0,
        slots: 1,
        ranks: vec![16],
        sites: vec![site],
    };
    let batch = Batch::random(&shape, &[0; 150]);
    let passes = |hands_over| {
        let hooks = Passes {
            hands_over,
            ..Passes::default()
        };
        let backend = Arc::new(WatchedHost::new(HostOptions::default(), hooks).unwrap());
        let spec = ScratchSpec {
            max_rows: 64,
            max_rank: 16,
            max_sites: 1,
            max_k_in: K_IN,
        };
        let settings = (LaunchOptions::default(), spec);
        let device_backend: TestBackend = backend.clone();
        let mut device = DeviceBatch::with_scratch(&device_backend, &batch, Via::Pair, settings);
        device.launch(Stream::OWN);
        backend.hooks().seen.lock().unwrap().clone()
    };
    assert_eq!(
        passes(true),
        [(0, 64, true), (64, 64, true), (128, 22, true)]
    );
    assert_eq!(passes(false), [(0, 150, false)]);
}

#[test]
fn a_scratch_for_smaller_launches_is_refused() {
    let mut setup = setup();
    let spec = ScratchSpec {
        max_rows: 1,
        max_rank: 1,
        max_sites: 1,
        max_k_in: 1,
    };
    setup.scratch = Scratch::new(setup.backend.clone(), spec).unwrap();
    assert!(
        setup
            .apply(|_| ())
            .is_err_and(|error| matches!(error, KernelError::ScratchTooSmall { rows: 3, .. }))
    );
}

#[test]
fn levers_leave_out_what_they_name() {
    let no_ffn = LaunchOptions {
        no_ffn: true,
        ..Default::default()
    };
    assert_eq!(
        Setup::new(no_ffn).apply(|_| ()),
        Ok(Applied::Skipped(Skip::NoFfn))
    );
    let no_apply = LaunchOptions {
        no_apply: true,
        ..Default::default()
    };
    assert_eq!(
        Setup::new(no_apply).apply(|_| ()),
        Ok(Applied::Skipped(Skip::NoApply))
    );
}

#[test]
fn groups_of_another_batch_or_table_are_refused() {
    let mut setup = setup();
    let pair = setup.adapter.pair;
    let tables = crate::testing::DeviceTables::upload(
        &(setup.backend.clone() as _),
        &[Some(pair); 2],
        (64, 48, 16),
    )
    .unwrap();
    let mut buffer = setup.out();
    for (groups, quantity) in [
        (setup.groups(3, &[0, 1, 0]), "entries"),
        (setup.groups(2, &[0, 1]), "rows"),
    ] {
        let x = setup.x.mat(ROWS, 64, 64).unwrap();
        let mut ctx = LaunchContext {
            kernels: &setup.kernels,
            stream: Stream::OWN,
            scratch: &mut setup.scratch,
        };
        let route = tables.route();
        let mut sites = [RouteSite {
            route,
            out: whole(&mut buffer),
        }];
        let error =
            apply_lora_bgmv(&mut ctx, SiteKind::Attention, x, &groups, &mut sites).unwrap_err();
        assert!(
            matches!(error, KernelError::SizeMismatch { quantity: q, .. } if q == quantity),
            "{error}"
        );
    }
    assert!(untouched(&buffer));
}

#[test]
fn a_layer_launches_what_is_installed() {
    let mut setup = setup();
    let installed = LoraSite {
        pair: Some(setup.adapter.pair),
        route: None,
    };
    let layer = LoraAttnWeights {
        layer: 7,
        q: installed,
        v: installed,
        ..Default::default()
    };
    assert!(!layer.is_empty() && LoraAttnWeights::default().is_empty());
    let mut outs = [setup.out(), setup.out(), setup.out()];
    let mut apply = |layer: &LoraAttnWeights, rows: LoraRows<'_>, outs: &mut [DeviceBuffer; 3]| {
        let [q, k, v] = outs.each_mut().map(whole);
        let x = setup.x.mat(ROWS, 64, 64).unwrap();
        let mut ctx = LaunchContext {
            kernels: &setup.kernels,
            stream: Stream::OWN,
            scratch: &mut setup.scratch,
        };
        layer.apply_qkv(&mut ctx, rows, x, QkvOut { q, k, v })
    };
    let applied = apply(&layer, LoraRows::Active, &mut outs);
    assert_eq!(applied, Ok(Applied::Launched { launches: 1 }));
    assert_eq!(outs.each_ref().map(untouched), [false, true, false]);
    let nothing = apply(&LoraAttnWeights::default(), LoraRows::Active, &mut outs);
    assert_eq!(nothing, Ok(Applied::Empty));
    setup.backend.synchronize(Stream::OWN).unwrap();
}

#[test]
fn no_rows_need_no_memory() {
    let mut setup = setup();
    let rows = raw_out(0, 0, 64);
    let x = rows.as_ref();
    let pair = setup.adapter.pair;
    let mut sites = [PairSite {
        pair,
        out: raw_out(0, 0, 48),
    }];
    let mut ctx = LaunchContext {
        kernels: &setup.kernels,
        stream: Stream::OWN,
        scratch: &mut setup.scratch,
    };
    let applied = apply_lora_delta(&mut ctx, SiteKind::Attention, x, &mut sites);
    assert_eq!(applied, Ok(Applied::Empty));
}
