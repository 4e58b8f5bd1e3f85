use super::*;
use crate::host::{Capacity, HostBackend};
use crate::testing::{Batch, BatchShape, Via};
use crate::{DeviceBuffer, LARGE_TILE_ROWS, LoraBackend, Stream, Tile};
use bytemuck::Zeroable;
use lora_weights::device::DevicePtr;
use std::sync::Arc;

/// A routed launch of four rows, two slots and one site that is in order, and the buffers it names.
struct Launch {
    backend: Arc<HostBackend>,
    params: DeltaParams,
    buffers: Vec<DeviceBuffer>,
}

const ROWS: u32 = 4;
const K_IN: u32 = 40;
const N_OUT: u32 = 24;
const RANK: u32 = 16;

impl Launch {
    fn new() -> Self {
        let backend = Arc::new(HostBackend::new());
        let mut buffers = Vec::new();
        let mut hold = |buffer: Result<DeviceBuffer, KernelError>| -> u64 {
            let buffer = buffer.unwrap();
            let address = buffer.ptr().0;
            buffers.push(buffer);
            address
        };
        let zeros = |bytes: u32| DeviceBuffer::zeroed(backend.clone(), bytes.into());
        let (a, b) = (hold(zeros(RANK * K_IN * 2)), hold(zeros(RANK * N_OUT * 2)));
        let tiles = [(0, 0, 3), (1, 3, 1)].map(|(entry, first, count)| Tile {
            entry,
            first,
            count,
            reserved: 0,
        });
        let mut params = DeltaParams {
            x: hold(zeros(ROWS * K_IN * 2)),
            x_stride: K_IN.into(),
            tiles: hold(DeviceBuffer::from_slice(backend.clone(), &tiles)),
            tile_count: hold(DeviceBuffer::from_slice(backend.clone(), &[2_u32])),
            perm: hold(DeviceBuffer::from_slice(backend.clone(), &[1_u32, 2, 3, 0])),
            rows: ROWS,
            x_row_count: ROWS,
            k_in: K_IN,
            k_blocks: 1,
            x_div: 1,
            tile_rows: 8,
            slots: 2,
            site_count: 1,
            pass_rows: ROWS,
            max_tiles: 2,
            ..DeltaParams::zeroed()
        };
        params.sites[0] = crate::DeltaSite {
            a_table: hold(DeviceBuffer::from_slice(backend.clone(), &[a, a])),
            b_table: hold(DeviceBuffer::from_slice(backend.clone(), &[b, b])),
            scale_table: hold(DeviceBuffer::from_slice(backend.clone(), &[1_f32, 1.0])),
            rank_table: hold(DeviceBuffer::from_slice(backend.clone(), &[RANK, 5])),
            out: hold(zeros(ROWS * N_OUT * 2)),
            out_stride: N_OUT.into(),
            partials: hold(zeros(32 << 10)),
            n_out: N_OUT,
            max_rank: RANK,
            ..crate::DeltaSite::zeroed()
        };
        Self {
            backend,
            params,
            buffers,
        }
    }

    /// Writes to the buffer that starts at `address`.
    fn poke<T: bytemuck::Pod>(&mut self, address: u64, index: usize, value: T) {
        let buffer = self.buffers.iter_mut().find(|b| b.ptr().0 == address);
        buffer.unwrap().upload(index, &[value]).unwrap();
    }

    fn run(&self) -> Result<(), KernelError> {
        self.backend.delta(Stream::OWN, &self.params)
    }
}

/// Breaks a launch.
type Break = fn(&mut Launch);

#[test]
fn a_launch_in_order_runs() {
    Launch::new().run().unwrap();
}

#[test]
fn addresses_outside_the_backend_are_errors() {
    const FAR: u64 = 1 << 40;
    let breaks: [(&str, Break); 15] = [
        ("x", |l| l.params.x += FAR),
        ("x", |l| l.params.x_row_count = 5),
        ("tiles", |l| l.params.tiles += FAR),
        ("tile count", |l| l.params.tile_count += FAR),
        ("permutation", |l| l.params.perm += FAR),
        ("x rows", |l| l.params.x_rows = FAR),
        ("A table of site 0", |l| l.params.sites[0].a_table += FAR),
        ("B table of site 0", |l| l.params.sites[0].b_table += FAR),
        ("scale table of site 0", |l| {
            l.params.sites[0].scale_table += FAR
        }),
        ("rank table of site 0", |l| {
            l.params.sites[0].rank_table += FAR
        }),
        ("out of site 0", |l| l.params.sites[0].out += 2),
        ("partials of site 0", |l| {
            l.params.sites[0].partials += 30 << 10
        }),
        ("A of site 0", |l| l.poke(l.params.sites[0].a_table, 1, FAR)),
        ("B of site 0", |l| l.poke(l.params.sites[0].b_table, 0, FAR)),
        ("A of site 0", |l| drop(l.buffers.remove(0))),
    ];
    for (operand, change) in breaks {
        let mut launch = Launch::new();
        change(&mut launch);
        let error = launch.run().unwrap_err();
        let KernelError::OutsideAllocation { operand: found, .. } = error else {
            panic!("{operand}: {error}");
        };
        assert_eq!(found.to_string(), operand);
    }
}

#[test]
fn device_data_that_leads_astray_is_an_error() {
    let breaks: [(&str, Break); 8] = [
        ("tile count", |l| l.poke(l.params.tile_count, 0, 3_u32)),
        ("tiles", |l| l.poke(l.params.tiles, 2, 0_u32)),
        ("tiles", |l| l.poke(l.params.tiles, 2, 9_u32)),
        ("tiles", |l| l.poke(l.params.tiles, 5, 2_u32)),
        ("tiles", |l| l.poke(l.params.tiles, 5, u32::MAX)),
        ("permutation", |l| l.poke(l.params.perm, 3, ROWS)),
        ("x rows", |l| l.params.x_row_count = 3),
        ("rank table of site 0", |l| {
            l.poke(l.params.sites[0].rank_table, 0, 17_u32)
        }),
    ];
    for (operand, change) in breaks {
        let mut launch = Launch::new();
        change(&mut launch);
        let error = launch.run().unwrap_err();
        let KernelError::BadIndex { operand: found, .. } = error else {
            panic!("{operand}: {error}");
        };
        assert_eq!(found.to_string(), operand);
    }
}

#[test]
fn a_row_named_twice_in_a_tile_is_an_error() {
    let mut launch = Launch::new();
    launch.poke(launch.params.perm, 2, 1_u32);
    assert_eq!(launch.run(), Err(KernelError::RepeatedRow { row: 1 }));
}

#[test]
fn sizes_that_no_kernel_has_are_errors() {
    let breaks: [Break; 11] = [
        |l| l.params.site_count = 5,
        |l| l.params.k_in = 0,
        |l| l.params.k_blocks = 2,
        |l| l.params.x_div = 0,
        |l| l.params.tile_rows = LARGE_TILE_ROWS + 1,
        |l| l.params.x_stride = 39,
        |l| l.params.sites[0].out_stride = 23,
        |l| l.params.sites[0].n_out = 0,
        |l| l.params.sites[0].max_rank = 0,
        |l| l.params.sites[0].max_rank = 24,
        |l| l.params.sites[0].max_rank = 528,
    ];
    for (index, change) in breaks.iter().enumerate() {
        let mut launch = Launch::new();
        change(&mut launch);
        let error = launch.run().unwrap_err();
        let expected = matches!(
            error,
            KernelError::OutOfRange { .. }
                | KernelError::StrideTooSmall { .. }
                | KernelError::UnpaddedRank { .. }
        );
        assert!(expected, "{index}: {error}");
    }
}

#[test]
fn writes_that_meet_reads_are_errors() {
    let breaks: [Break; 5] = [
        |l| l.params.sites[0].out = l.params.x,
        |l| l.params.sites[0].out = l.params.sites[0].partials,
        |l| l.params.x = l.params.sites[0].partials,
        |l| l.poke(l.params.sites[0].a_table, 0, l.params.sites[0].partials),
        |l| {
            l.params.site_count = 2;
            l.params.sites[1] = l.params.sites[0];
        },
    ];
    for (index, change) in breaks.iter().enumerate() {
        let mut launch = Launch::new();
        change(&mut launch);
        let error = launch.run().unwrap_err();
        assert!(
            matches!(error, KernelError::Overlap { .. }),
            "{index}: {error}"
        );
    }
}

#[test]
fn unaligned_adapters_are_errors() {
    let mut launch = Launch::new();
    launch.poke(launch.params.sites[0].a_table, 0, 0x1008_u64);
    let error = launch.run().unwrap_err();
    assert!(
        matches!(error, KernelError::Misaligned { align: 16, .. }),
        "{error}"
    );
}

#[test]
fn an_entry_without_address_or_rank_is_no_adapter() {
    let changes: [Break; 3] = [
        |l| l.poke(l.params.sites[0].a_table, 0, 0_u64),
        |l| l.poke(l.params.sites[0].rank_table, 0, 0_u32),
        |l| l.params.slots = 1,
    ];
    for change in changes {
        let mut launch = Launch::new();
        change(&mut launch);
        launch.run().unwrap();
    }
}

#[test]
fn a_pass_takes_only_its_own_tiles() {
    let launch = Launch::new();
    let arena = launch.backend.arena();
    let tiles_of = |pass_first, pass_rows| {
        let mut params = launch.params;
        params.pass_first = pass_first;
        params.pass_rows = pass_rows;
        let delta = check_delta(&arena, &params).unwrap();
        delta.map_or(0, |delta| delta.tiles.len())
    };
    assert_eq!((tiles_of(0, 4), tiles_of(0, 3), tiles_of(3, 1)), (2, 1, 1));
    assert_eq!((tiles_of(1, 2), tiles_of(0, 0)), (0, 0));
}

#[test]
fn memory_that_was_freed_is_not_found() {
    let mut arena = Arena::new(Capacity::Limit(1 << 20));
    let ptr: DevicePtr = arena.alloc_zeroed(64).unwrap();
    arena.free(ptr).unwrap();
    let error = arena
        .span::<f32>(Operand::shared("x"), ptr.0, 1)
        .unwrap_err();
    assert!(matches!(error, KernelError::OutsideAllocation { .. }));
}

#[test]
fn a_plain_batch_passes_every_check() {
    let backend: crate::testing::TestBackend = Arc::new(HostBackend::new());
    let batch = Batch::random(&BatchShape::single(1, 4, (64, 64)), &[0, -1, 0]);
    batch.assert_correct(&backend, Via::Routed);
}
