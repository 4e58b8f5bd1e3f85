use super::*;
use crate::testing::{Batch, BatchShape, SiteShape, TestBackend, Via, bits, correctness, experts};
use crate::{DeviceBuffer, LaunchOptions};
use half::bf16;

fn backend() -> TestBackend {
    Arc::new(HostBackend::new())
}

/// One test for each body that every backend is held to.
macro_rules! bodies {
    ($($module:ident::$body:ident($($argument:expr)?)),* $(,)?) => {
        $(#[test]
        fn $body() {
            $module::$body(&backend() $(, $argument)?);
        })*
    };
}

bodies! {
    correctness::random_shapes_match_the_reference(0..correctness::RANDOM_SHAPES),
    correctness::long_batches_match_the_reference(),
    correctness::many_sites_match_the_reference(),
    correctness::base_rows_keep_their_bits(),
    correctness::empty_batches_launch_nothing(),
    correctness::wrong_results_are_caught(),
    bits::a_row_alone_equals_itself_in_a_batch(),
    bits::pair_equals_routed(),
    bits::small_tiles_equal_large_tiles(),
    bits::spread_rows_equal_others(),
    bits::few_spread_rows_do_not_depend_on_passes(),
    bits::many_spread_rows_equal_others(),
    bits::tiles_of_several_blocks_equal_others(),
    bits::padded_rank_equals_true_rank(),
    bits::every_run_is_the_same(50),
    bits::passes_do_not_change_bits(),
    bits::groupings_agree_with_the_rule(0..usize::MAX),
    bits::shared_x_rows_equal_copied_ones(),
    experts::experts_are_grouped_by_the_rule(0..usize::MAX),
}

fn mixed_batch() -> Batch {
    let site = |n_out, gap| SiteShape {
        n_out,
        gap,
        max_rank: 40,
    };
    let shape = BatchShape {
        slots: 4,
        ranks: vec![40, 3, 17],
        x_gap: 3,
        sites: vec![site(333, 2), site(65, 0)],
        ..BatchShape::single(9, 40, (2077, 0))
    };
    let slots: Vec<i32> = (0..150)
        .map(|row| [0, 3, 1, -1, 3, 2, 3][row % 7])
        .collect();
    Batch::random(&shape, &slots)
}

fn run_with(batch: &Batch, options: HostOptions) -> Vec<Vec<u16>> {
    let backend: TestBackend = Arc::new(HostBackend::with_options(options).unwrap());
    let outs = batch.run(&backend, Via::Routed, LaunchOptions::default());
    let bits = |out: &Vec<bf16>| out.iter().map(|v| v.to_bits()).collect();
    outs.iter().map(bits).collect()
}

#[test]
fn threads_and_simd_levels_give_the_same_bits() {
    let batch = mixed_batch();
    let expected = run_with(
        &batch,
        HostOptions {
            threads: 1,
            ..Default::default()
        },
    );
    for threads in [2, 3, 8] {
        let options = HostOptions {
            threads,
            ..Default::default()
        };
        assert!(run_with(&batch, options) == expected, "{threads} threads");
    }
    for simd in [SimdLevel::Portable, SimdLevel::Avx2, SimdLevel::Avx512] {
        if simd.is_available() {
            let options = HostOptions {
                threads: 2,
                simd: Some(simd),
                ..Default::default()
            };
            assert!(run_with(&batch, options) == expected, "{simd:?}");
        }
    }
}

#[test]
fn a_level_that_the_cpu_lacks_is_refused() {
    for simd in [SimdLevel::Avx2, SimdLevel::Avx512] {
        let options = HostOptions {
            simd: Some(simd),
            ..Default::default()
        };
        match HostBackend::with_options(options) {
            Ok(backend) => assert_eq!(backend.simd(), simd),
            Err(error) => assert!(matches!(error, KernelError::NoSimd { .. })),
        }
    }
}

#[test]
fn launches_from_several_threads_take_turns() {
    let backend: TestBackend = Arc::new(HostBackend::new());
    let batch = mixed_batch();
    let expected = batch.run(&backend, Via::Routed, LaunchOptions::default());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    let outs = batch.run(&backend, Via::Routed, LaunchOptions::default());
                    let pairs = outs.iter().zip(&expected);
                    for (out, expected) in pairs {
                        // NaN gaps are not equal to themselves, their bits are.
                        let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(out), bits(expected));
                    }
                }
            });
        }
    });
}

#[test]
fn strided_uploads_land_row_by_row() {
    let backend: Arc<HostBackend> = Arc::new(HostBackend::new());
    let buffer = DeviceBuffer::zeroed(backend.clone(), 32).unwrap();
    let mut staging = backend.stage(20).unwrap();
    staging
        .bytes_mut()
        .iter_mut()
        .zip(1..)
        .for_each(|(byte, i)| *byte = i);
    let copy = UploadCopy {
        src_offset: 2,
        src_stride: 6,
        dst: buffer.ptr().offset(1),
        dst_stride: 10,
        row_bytes: 4,
        rows: 3,
    };
    let done = backend.upload(staging, &[copy]).unwrap();
    assert!(done.is_done().unwrap());
    assert_eq!(done.event(), None);
    assert_eq!(done.wait().unwrap().bytes().len(), 20);
    let mut expected = [0_u8; 32];
    expected[1..5].copy_from_slice(&[3, 4, 5, 6]);
    expected[11..15].copy_from_slice(&[9, 10, 11, 12]);
    expected[21..25].copy_from_slice(&[15, 16, 17, 18]);
    assert_eq!(buffer.download::<u8>(0, 32).unwrap(), expected);
}

#[test]
fn large_uploads_land_whole() {
    let backend: Arc<HostBackend> = Arc::new(HostBackend::new());
    let values: Vec<u32> = (0..1 << 20).collect();
    let mut buffer = DeviceBuffer::zeroed(backend, 4 << 20).unwrap();
    buffer.upload(0, &values).unwrap();
    assert_eq!(buffer.download::<u32>(0, 1 << 20).unwrap(), values);
}

/// Changes a copy of four rows of 8 bytes, 16 bytes apart in the destination.
type Change = fn(&mut UploadCopy);

#[test]
fn bad_copies_are_refused() {
    let backend: Arc<HostBackend> = Arc::new(HostBackend::new());
    let buffer = DeviceBuffer::zeroed(backend.clone(), 64).unwrap();
    let upload = |change: Change| {
        let mut copy = UploadCopy {
            src_offset: 0,
            src_stride: 8,
            dst: buffer.ptr(),
            dst_stride: 16,
            row_bytes: 8,
            rows: 4,
        };
        change(&mut copy);
        match backend.upload(backend.stage(32).unwrap(), &[copy]) {
            Ok(_) => "done",
            Err(MemoryError::BadCopy { side, .. }) => side,
            Err(MemoryError::OutOfBounds { .. }) => "outside",
            Err(error) => panic!("{error}"),
        }
    };
    let changes: [(&str, Change); 8] = [
        ("done", |_| ()),
        ("done", |copy| (copy.rows, copy.dst) = (0, DevicePtr(64))),
        ("source", |copy| copy.src_offset = 1),
        ("source", |copy| copy.src_stride = usize::MAX),
        ("destination", |copy| copy.dst_stride = 7),
        ("destination", |copy| copy.dst_stride = usize::MAX),
        ("outside", |copy| copy.dst_stride = 19),
        ("outside", |copy| copy.dst = DevicePtr(64)),
    ];
    for (index, (expected, change)) in changes.into_iter().enumerate() {
        assert_eq!(upload(change), expected, "{index}");
    }
}

#[test]
fn a_memory_limit_is_kept() {
    let options = HostOptions {
        memory_limit: Some(1000),
        ..Default::default()
    };
    let backend = HostBackend::with_options(options).unwrap();
    let ptr = backend.alloc_zeroed(900).unwrap();
    let info = backend.memory_info().unwrap();
    assert_eq!((info.free, info.total), (100, 1000));
    let error = backend.alloc_zeroed(101).unwrap_err();
    assert_eq!(
        error,
        MemoryError::OutOfMemory {
            requested: 101,
            free: 100
        }
    );
    backend.free(ptr).unwrap();
    assert_eq!(backend.memory_info().unwrap().free, 1000);
}

#[test]
fn grouping_into_too_little_room_is_an_error() {
    let backend = Arc::new(HostBackend::new());
    let rows = DeviceBuffer::from_slice(backend.clone(), &[0_i32, 1, 2]).unwrap();
    let room = DeviceBuffer::zeroed(backend.clone(), 256).unwrap();
    let params = GroupParams {
        seq_slot: rows.ptr().0,
        tile_count: room.ptr().0,
        tiles: room.ptr().0 + 16,
        perm: room.ptr().0 + 128,
        rows: 3,
        slots: 3,
        small_max: 48,
        max_tiles: 2,
    };
    let error = backend.group_rows(Stream::OWN, &params).unwrap_err();
    assert!(
        matches!(error, KernelError::BadIndex { value: 3, .. }),
        "{error}"
    );
    let outside = GroupParams {
        perm: room.ptr().0 + 250,
        max_tiles: 3,
        ..params
    };
    let error = backend.group_rows(Stream::OWN, &outside).unwrap_err();
    assert!(matches!(error, KernelError::Misaligned { .. }), "{error}");
}
